"""Static analysis of training code for patterns that lead to NaN. Imports neither torch nor the code it checks."""

from .check import SYNTAX_ERROR, check_source
from .files import lint_paths
from .finding import Finding
from .rule import RULES, Rule

__all__ = ["RULES", "SYNTAX_ERROR", "Finding", "Rule", "check_source", "lint_paths"]
