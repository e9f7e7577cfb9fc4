"""A static look at training code for the patterns that go NaN later. Needs neither torch nor the code's own imports."""

from .check import SYNTAX_ERROR, check_source
from .files import lint_paths
from .finding import Finding
from .rule import RULES, Rule

__all__ = ["RULES", "SYNTAX_ERROR", "Finding", "Rule", "check_source", "lint_paths"]
