"""Rewrites the blamed line of source with the safe operation, where the result is certain.

Not for `exp`: safe.exp returns the dtype's largest number, which overflows in the next operation.
"""

from __future__ import annotations

import ast

from ..core.causes import SAFE_CALLS

_OPERATORS: dict[str, tuple[type[ast.operator], str]] = {
    "div": (ast.Div, "safe.div({}, {})"),
    "reciprocal": (ast.Div, "safe.div({}, {})"),  # 1 / x is dispatched as reciprocal
    "rsqrt": (ast.Div, "safe.div({}, {})"),
    "pow": (ast.Pow, "safe.pow({}, {})"),
}
_METHODS_OF_TWO = {"div": "safe.div({}, {})", "true_divide": "safe.div({}, {})", "pow": "safe.pow({}, {})"}


def rewritten(code: str, operation: str) -> str:
    """The line with one operation replaced; empty if the line contains none or several, or is only part of a statement."""
    text = code.strip()
    tree = _parsed(text)
    if tree is None or not text.isascii():  # ast offsets count bytes
        return ""
    found = [(node, safe) for node in ast.walk(tree) if (safe := _safe_form(node, operation, text))]
    if len(found) != 1:
        return ""
    node, safe = found[0]
    assert isinstance(node, ast.expr)
    if node.lineno != 1 or node.end_lineno != 1 or node.end_col_offset is None:
        return ""
    after = text[node.end_col_offset :].lstrip()
    binds_closer = " / " in safe and (
        after[:1] in ("*", ".", "[") or text[: node.col_offset].rstrip()[-1:] in tuple("*/-")
    )
    safe = f"({safe})" if binds_closer else safe
    return f"{text[: node.col_offset]}{safe}{text[node.end_col_offset :]}"


def _parsed(text: str) -> ast.AST | None:
    for candidate in (text, f"{text} pass"):  # the first line of a compound statement
        try:
            return ast.parse(candidate)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _safe_form(node: ast.AST, operation: str, text: str) -> str:
    if isinstance(node, ast.BinOp) and operation in _OPERATORS:
        kind, form = _OPERATORS[operation]
        return form.format(_source(node.left, text), _source(node.right, text)) if isinstance(node.op, kind) else ""
    if not isinstance(node, ast.Call) or node.keywords or not isinstance(node.func, ast.Attribute):
        return ""
    if node.func.attr != operation:
        return ""
    is_function = isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "F", "np")
    operands = node.args if is_function else [node.func.value, *node.args]
    if any(isinstance(operand, ast.Starred) for operand in operands):
        return ""
    sources = [_source(operand, text) for operand in operands]
    if len(operands) == 1 and operation in SAFE_CALLS:
        needs_brackets = "1 + " in SAFE_CALLS[operation] and not isinstance(operands[0], (ast.Name, ast.Call))
        return SAFE_CALLS[operation].format(f"({sources[0]})" if needs_brackets else sources[0])
    return _METHODS_OF_TWO[operation].format(*sources) if len(operands) == 2 and operation in _METHODS_OF_TWO else ""


def _source(node: ast.expr, text: str) -> str:
    found = ast.get_source_segment(text, node) or ast.unparse(node)
    return found.strip()
