"""Candidates for a changed line: a safe form of the operation that went bad, or of an argument of the call it happened in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# By the operation: forms of it, x being its operand and y the second one. The first that works and changes nothing else is taken.
_FORMS: dict[str, tuple[str, ...]] = {
    "div": ("safe.div({x}, {y})", "{x} / {y}.clamp_min(1e-6)", "{x} / max({y}, 1)", "{x} / ({y} + 1e-6)"),
    "log": ("safe.log({x})", "torch.log({x}.clamp_min(1e-6))"),
    "log2": ("torch.log2({x}.clamp_min(1e-6))",),
    "log10": ("torch.log10({x}.clamp_min(1e-6))",),
    "log1p": ("torch.log1p({x}.clamp_min(-1 + 1e-6))",),
    "sqrt": ("safe.sqrt({x})", "torch.sqrt({x}.clamp_min(1e-12))", "torch.sqrt({x} + 1e-12)"),
    "rsqrt": ("torch.rsqrt({x}.clamp_min(1e-12))",),
    "reciprocal": ("safe.div(1, {x})", "torch.reciprocal({x}.clamp_min(1e-6))"),
    "exp": ("torch.exp({x}.clamp(max=30.0))", "torch.exp({x}.clamp(max=10.0))"),
    "pow": ("safe.pow({x}, {y})", "{x}.clamp_min(1e-6) ** {y}", "torch.nan_to_num({x}) ** {y}"),
    "acos": ("safe.acos({x})", "torch.acos({x}.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "asin": ("safe.asin({x})", "torch.asin({x}.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "std": ("safe.std({x}{rest})",),
    "norm": ("safe.norm({x}{rest})",),
    "normalize": ("safe.normalize({x}{rest})",),
    "atanh": ("safe.atanh({x})", "torch.atanh({x}.clamp(-1 + 1e-6, 1 - 1e-6))"),
}
# Of a whole call, by the cause.
_AROUND: dict[str, tuple[str, ...]] = {
    "empty_reduction": ("torch.nan_to_num({call})",),
    "infeasible_target": ("torch.nan_to_num({call}, posinf=0.0)", "torch.nan_to_num({call}, neginf=0.0)"),
    "neg_inf_mask": ("torch.nan_to_num({call}, neginf=-1e9)",),
}
_NONZERO = ("{x}.clamp_min(1e-6)", "{x}.masked_fill({x} == 0, 1e-6)", "{x} + 1e-6", "torch.nan_to_num({x})")
_SYMMETRIC = "{x}.clamp(-1 + 1e-6, 1 - 1e-6)"
# Of an argument, by the cause.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "division_by_zero": _NONZERO,
    "log_of_nonpositive": ("{x}.clamp_min(1e-6)", _SYMMETRIC, "{x}.clamp(1e-6, 1 - 1e-6)", "torch.nn.functional.softplus({x})"),
    "invalid_domain": (_SYMMETRIC, "{x}.clamp_min(1e-6)", "{x}.clamp(1e-6, 1 - 1e-6)"),
    "singular_gradient": ("{x}.clamp_min(1e-12)", "{x}.masked_fill({x} == 0, 1e-6)", "{x} + 1e-6", _SYMMETRIC),
    "masked_branch_gradient": ("torch.nan_to_num({x})", *_NONZERO[:3], _SYMMETRIC, "{x}.clamp(max=30.0)"),
    "neg_inf_mask": ("{x}.clamp_min(-1e9)", "torch.nan_to_num({x}, neginf=-1e9)", "{x}.clamp_min(-1e4)"),
    "exp_overflow": ("{x}.clamp(max=30.0)", "{x}.clamp(max=10.0)", "{x}.clamp(-10.0, 10.0)"),
    "fp16_overflow": ("torch.as_tensor({x}, dtype=torch.float32)",),
    "fp16_underflow": ("torch.as_tensor({x}, dtype=torch.float32)", *_NONZERO[:3]),
    "degenerate_decomposition": ("{x} + torch.diag(torch.linspace(1e-4, 5e-4, {x}.shape[-1], dtype={x}.dtype, device={x}.device))",),
    "empty_reduction": ("torch.nan_to_num({x})",),
    "bad_input_data": ("torch.nan_to_num({x})", "{x}.clamp_min(1e-6)"),
    "custom_backward_bug": (),
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Div: ("div", "reciprocal", "rsqrt", "true_divide"),
    ast.Pow: ("pow",),
}
_KEYWORDS = {"ctc_loss": (("zero_infinity", "True"),), "multi_head_attention_forward": (("need_weights", "False"),)}
_RENAMED = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
"""Memory that was never written."""
MAX_CANDIDATES = 60


@dataclass(frozen=True)
class Candidate:
    source: str
    """Of the whole file, with the changed line, and without an import that it needs."""
    what: str
    imports: tuple[str, ...] = ()
    line: int = 0
    replaces_call: bool = False
    """The bad result itself is replaced, and not what it was made of."""


@dataclass(frozen=True)
class _Edit:
    start: int
    stop: int
    text: str


def candidates(source: str, line: int, operation: str, cause: str) -> list[Candidate]:
    """Changed sources, the most specific first; none where the line cannot be parsed. One that cannot be compiled is found out when it is tried."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = _Line(source, line, tree)
    bound = _imported(tree)
    result: dict[str, Candidate] = {}
    for edits, what in [*found.of_operation(operation), *found.of_calls(cause), *found.of_names(cause)]:
        changed = found.apply(edits)
        if changed != source and changed not in result:
            result[changed] = Candidate(changed, what, _imports(changed, source, bound), line, "the call" in what)
    return list(result.values())[:MAX_CANDIDATES]


def _imported(tree: ast.Module) -> set[str]:
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def _imports(changed: str, source: str, bound: set[str]) -> tuple[str, ...]:
    needed = []
    if changed.count("safe.") > source.count("safe.") and "safe" not in bound:
        needed.append("from safetrain import safe")
    if changed.count("torch.") > source.count("torch.") and "torch" not in bound:
        needed.append("import torch")
    return tuple(needed)


class _Line:
    def __init__(self, source: str, line: int, tree: ast.Module) -> None:
        self._bytes = source.encode()
        self._starts = [0]
        for text in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(text))
        statement = _statement_at(tree, line)
        is_simple = statement is not None and not hasattr(statement, "body")
        self._statement_start = statement if is_simple and self._stands_alone(statement) else None
        self._nodes = [node for node in _expressions_at(tree, line) if node.end_lineno is not None]

    def _stands_alone(self, statement: ast.stmt | None) -> bool:
        if statement is None:
            return False
        start = self._starts[statement.lineno - 1]
        return not self._bytes[start : start + statement.col_offset].strip()

    def apply(self, edits: list[_Edit]) -> str:
        result = self._bytes
        for edit in sorted(edits, key=lambda each: -each.start):
            result = result[: edit.start] + edit.text.encode() + result[edit.stop :]
        return result.decode()

    def of_operation(self, operation: str) -> Iterator[tuple[list[_Edit], str]]:
        """Each form at each place of the operation, and at all of its places together."""
        places = [(node, operands) for node in self._nodes if (operands := _operands(node, operation)) is not None]
        name = "div" if operation in ("true_divide",) else operation
        places = [(n, o) for n, o in places if not any(_contains(other, n) and other is not n for other, _ in places)]
        forms = _FORMS.get(
            "div" if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) for n, _ in places) else name, ()
        )
        for form in forms:
            edits = [edit for node, operands in places if (edit := self._formed(node, operands, form)) is not None]
            if len(edits) > 1:
                yield edits, f"{_shown(form)} at all places of the line"
            for edit in edits:
                yield [edit], _shown(form)
        for keyword, value in _KEYWORDS.get(operation, ()):
            for node, _ in places:
                if isinstance(node, ast.Call) and not any(k.arg == keyword for k in node.keywords):
                    yield [self._with_keyword(node, keyword, value)], f"{keyword}={value}"

    def of_names(self, cause: str) -> Iterator[tuple[list[_Edit], str]]:
        """A statement before, so that later uses of the same variable are safe as well."""
        start = self._statement_start
        if start is None:
            return
        indent = self._bytes[self._starts[start.lineno - 1] :][: start.col_offset].decode()
        names = dict.fromkeys(n.id for n in self._nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        at = self._starts[start.lineno - 1]
        for form in _ARGUMENTS.get(cause, ()):
            for name in names:
                if name not in ("torch", "F", "nn", "math", "np", "self", "safe"):
                    text = form.format(x=name)
                    yield [_Edit(at, at, f"{indent}{name} = {text}\n")], f"{name} = {text} before it"
            for name in _assigned(start):
                after = self._starts[start.end_lineno or start.lineno]
                text = form.format(x=name)
                yield [_Edit(after, after, f"{indent}{name} = {text}\n")], f"{name} = {text} after it"

    def of_calls(self, cause: str) -> Iterator[tuple[list[_Edit], str]]:
        """Each argument of each call of the line made harmless before the call, and each call as a whole."""
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        for form in _ARGUMENTS.get(cause, ()):
            for call in calls:
                for number, argument in self._values(call):
                    if form.count("{x}") > 1 and not isinstance(argument, (ast.Name, ast.Attribute)):
                        continue  # it would be computed twice
                    yield (
                        [self._edit(argument, form.format(x=self._bracketed(argument)))],
                        f"{number}: {form.format(x='x')}",
                    )
        for form in _AROUND.get(cause, ()):
            for call in calls:
                yield [self._edit(call, form.format(call=self._text(call)))], form.format(call="the call")
        for call in calls:
            name = _name(call)
            if cause == "custom_backward_bug" and name in _RENAMED and isinstance(call.func, ast.Attribute):
                renamed = f"{self._text(call.func.value)}.{_RENAMED[name]}"
                yield [self._edit(call.func, renamed)], f"{_RENAMED[name]} instead of {name}"
            if cause == "custom_backward_bug":
                yield [self._edit(call, f"torch.nan_to_num({self._text(call)})")], "nan_to_num(the call)"
            if cause == "neg_inf_mask" and any(k.arg == "key_padding_mask" for k in call.keywords):
                if not any(k.arg == "need_weights" for k in call.keywords):
                    yield [self._with_keyword(call, "need_weights", "False")], "need_weights=False"
            if cause == "infeasible_target" and name in ("CTCLoss", "ctc_loss"):
                yield [self._with_keyword(call, "zero_infinity", "True")], "zero_infinity=True"

    def _values(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """What a call is given: its arguments, and the object that a method is called on."""
        if isinstance(call.func, ast.Attribute) and not _is_module(call.func.value):
            yield "the object", call.func.value
        for index, argument in enumerate(call.args):
            if not isinstance(argument, (ast.Constant, ast.Starred, ast.Lambda, ast.List, ast.Tuple, ast.UnaryOp)):
                yield f"argument {index + 1}", argument
        for keyword in call.keywords:
            if keyword.arg is not None and not isinstance(
                keyword.value, (ast.Constant, ast.Lambda, ast.List, ast.Tuple)
            ):
                yield f"argument {keyword.arg}", keyword.value

    def _formed(self, node: ast.expr, operands: list[ast.expr], form: str) -> _Edit | None:
        if "{y}" in form and len(operands) < 2:
            return None
        is_function = form.startswith("safe.")
        texts = [self._text(o) if is_function else self._bracketed(o) for o in operands[:2]]
        keywords = node.keywords if isinstance(node, ast.Call) else []
        rest = "".join(f", {self._text(o)}" for o in operands[1:])
        rest += "".join(f", {k.arg}={self._text(k.value)}" for k in keywords)
        text = form.format(x=texts[0], y=texts[1] if len(texts) > 1 else "", rest=rest)
        loses_arguments = len(operands) > 2 and "{rest}" not in form
        return None if loses_arguments else self._edit(node, f"({text})" if " " in form and not is_function else text)

    def _with_keyword(self, call: ast.Call, keyword: str, value: str) -> _Edit:
        stop = self._offset(call.end_lineno or 1, call.end_col_offset or 0) - 1
        before = self._bytes[:stop].rstrip()
        comma = "" if before.endswith((b"(", b",")) else ", "
        return _Edit(stop, stop, f"{comma}{keyword}={value}")

    def _edit(self, node: ast.expr, text: str) -> _Edit:
        start = self._offset(node.lineno, node.col_offset)
        return _Edit(start, self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0), text)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _text(self, node: ast.expr) -> str:
        edit = self._edit(node, "")
        return self._bytes[edit.start : edit.stop].decode()

    def _bracketed(self, node: ast.expr) -> str:
        """So that a method can be called on it."""
        is_simple = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))
        return self._text(node) if is_simple else f"({self._text(node)})"


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """The smallest statement that this line belongs to."""
    statements = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return min(statements, key=lambda node: (node.end_lineno or 0) - node.lineno) if statements else None


def _expressions_at(tree: ast.Module, line: int) -> list[ast.expr]:
    """The expressions of the smallest statement that this line belongs to, without the statements inside it."""
    smallest = _statement_at(tree, line)
    if smallest is None:
        return []
    found: list[ast.expr] = []
    todo: list[ast.AST] = [smallest]
    while todo:
        node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt):
                todo.append(child)
                if isinstance(child, ast.expr):
                    found.append(child)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _operands(node: ast.expr, operation: str) -> list[ast.expr] | None:
    """The operands of a node that is this operation."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right] if operation in _OPERATORS.get(type(node.op), ()) else None
    if not isinstance(node, ast.Call) or _name(node) != operation:
        return None
    if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        return [node.func.value, *node.args]
    return list(node.args)


def _shown(form: str) -> str:
    return form.format(x="x", y="y", rest="")


def _assigned(statement: ast.stmt) -> list[str]:
    """The variables that a statement gives a value."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _is_module(node: ast.expr) -> bool:
    """`torch`, `F`, `torch.linalg`: what is before the dot is no tensor."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "np", "math", "nn", "linalg", "safe")


def _contains(outer: ast.expr, inner: ast.expr) -> bool:
    return any(child is inner for child in ast.walk(outer))
