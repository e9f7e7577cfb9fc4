"""Applies the rules to one source text."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Collection

from . import rules  # noqa: F401  # registers them
from .context import Context
from .events import Routine
from .finding import Finding
from .optout import is_opted_out, opt_outs
from .rule import BY_OPERATION, RULES, Rule
from .rules.masks import hidden
from .summaries import Summaries
from .value import Value
from .vocabulary import words
from .walk import Walker

SYNTAX_ERROR = "ST001"
# A file that imports one of these and not torch is not checked.
OTHER_ARRAYS = words("numpy jax tensorflow mlx keras cupy pandas sympy paddle mpmath decimal fractions")


def check_source(source: str | bytes, path: str = "<text>", codes: Collection[str] | None = None) -> list[Finding]:
    """Every finding in a source text, sorted by line and column; `codes` selects the rules.

    >>> [(found.line, found.code) for found in check_source("import torch\\nloss = torch.log(torch.softmax(x, -1))")]
    [(2, 'ST101')]
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the checked code: an invalid escape, `is` with a literal
            tree = ast.parse(source, filename=path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [_syntax_error(error, path)] if codes is None or SYNTAX_ERROR in codes else []
    if not _uses_tensors(tree):
        return []
    text = source if isinstance(source, str) else source.decode("utf-8", errors="replace")
    return _Check(tree, text, path, codes).findings()


class _Check:
    def __init__(self, tree: ast.Module, source: str, path: str, codes: Collection[str] | None) -> None:
        self.tree, self.source, self.path = tree, source, path
        self.codes = RULES.keys() if codes is None else codes
        self.found: dict[tuple[str, int, int], tuple[Finding, ast.AST, Value | None]] = {}
        self.cancelled: set[tuple[str, int, int]] = set()

    def findings(self) -> list[Finding]:
        walker = Walker(self._value, self._routine)
        walker.summary = Summaries(self.tree, self.path)
        walker.file(self.tree)
        outs = opt_outs(self.source)
        starts = _statement_starts(self.tree) if outs else {}
        return sorted(
            finding
            for key, (finding, node, _) in self.found.items()
            if key not in self.cancelled
            and not is_opted_out(outs, node, starts.get(finding.line, finding.line), finding.code)
        )

    def _value(self, value: Value, context: Context) -> None:
        self._withdraw(value, context)
        for rule in BY_OPERATION.get(value.op, ()):
            if rule.code in self.codes and value.args and rule.check is not None:
                message = rule.check(value, context)
                if message and value.node is not None:
                    self._add(rule, message, value.node, value)

    def _withdraw(self, value: Value, context: Context) -> None:
        """Withdraws findings that a later operation makes harmless.

        Scores masked with -inf by masked_fill (not by adding -inf), then softmax, then zeros filled in: also the gradient is
        finite. A `where` on the denominator leaves a bad gradient only, which is a finding of its own (ST401). `.item()` has
        no gradient.
        """
        if value.op in ("item", "tolist", "numpy") and value.args:
            self._cancel(("ST202",), value.args[0])
        if value.op == "where" and len(value.args) > 2:
            for branch in value.args[1:3]:
                if operation := hidden(branch, value.args[0], context):
                    self._cancel(("ST102", "ST201", "ST203"), operation)
        if value.op in ("masked_fill", "nan_to_num", "where"):
            for source in value.args:
                while source.op in ("dropout", "call") and source.args:
                    source = source.args[0]
                scores = source.args[0] if source.op in ("softmax", "log_softmax") and source.args else None
                if scores is not None and scores.masked and scores.op != "add":
                    self._cancel(("ST405",), source)

    def _cancel(self, codes: tuple[str, ...], value: Value) -> None:
        # A variable has its own node, but the arguments of the value assigned to it.
        for key, (_, _, made) in self.found.items():
            if key[0] in codes and made is not None and made.args is value.args:
                self.cancelled.add(key)

    def _routine(self, routine: Routine) -> None:
        for rule in RULES.values():
            if rule.check_routine is not None and rule.code in self.codes:
                for event, message in rule.check_routine(routine):
                    self._add(rule, message, event.node)

    def _add(self, rule: Rule, message: str, node: ast.AST, value: Value | None = None) -> None:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        finding = Finding(self.path, line, column, rule.code, message, rule.why, rule.safe)
        self.found.setdefault((rule.code, line, column), (finding, node, value))


def _syntax_error(error: Exception, path: str) -> Finding:
    line = getattr(error, "lineno", None) or 1
    column = getattr(error, "offset", None) or 1
    return Finding(
        path, line, max(column, 1), SYNTAX_ERROR, f"cannot be parsed: {getattr(error, 'msg', None) or error}"
    )


def _uses_tensors(tree: ast.Module) -> bool:
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    return "torch" in imported or not imported & OTHER_ARRAYS


def _statement_starts(tree: ast.Module) -> dict[int, int]:
    """For each line, the first line of the innermost simple statement it belongs to."""
    starts: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                starts[line] = max(starts.get(line, 0), node.lineno)
    return starts
