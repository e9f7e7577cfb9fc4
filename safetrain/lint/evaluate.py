"""Evaluates expressions of a syntax tree: literals, names, operators, containers and assignments."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from math import inf, pi
from typing import Any

from .calls import Calls
from .context import Context, dotted_name, tested_names
from .scope import Scope
from .value import UNKNOWN, Value, join, named_value, number, reference
from .vocabulary import words

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Pow: "pow",
    ast.MatMult: "matmul", ast.BitAnd: "logical_and", ast.BitOr: "logical_or", ast.Mod: "mod",
}  # fmt: skip
TRANSPARENT_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "values", "data", "real"})


class Evaluator(Calls):
    """Evaluates expressions in the current scope and context."""

    def value(self, node: ast.expr | None) -> Value:
        if node is None:
            return UNKNOWN
        method = _HANDLERS.get(type(node))
        if method is not None:
            return method(self, node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return Value("unknown", node=node)

    # --- names and literals -------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> Value:
        if isinstance(node.value, (int, float)):
            try:
                return number(node.value, node)
            except OverflowError:  # an integer too large for a float
                return Value("const", node=node, host=True, grad=False)
        return Value(
            "const", node=node, ref=repr(node.value) if isinstance(node.value, str) else "", host=True, grad=False
        )

    def _name(self, node: ast.Name) -> Value:
        found = self.scope.find(node.id)
        if found is not None:
            return found if found.op == "ref" else found.but(node=node).named(node.id)
        if node.id in _BUILTINS:
            return reference(f"builtins.{node.id}")
        if node.id == "F":  # by convention, also from a star import
            return reference("torch.nn.functional")
        return named_value(node.id, node)

    def _attribute(self, node: ast.Attribute) -> Value:
        dotted = dotted_name(node)
        found = self.scope.find(dotted) if dotted else None
        if found is not None:
            return found.but(node=node).named(dotted) if found.op != "ref" else found
        base = self.value(node.value)
        if base.op == "ref":
            dotted = f"{base.ref}.{node.attr}"
            return _CONSTANTS.get(dotted) or reference(dotted)
        if base.op == "finfo" and node.attr in ("eps", "tiny", "smallest_normal", "resolution"):
            return Value("eps", node=node, low=1e-320, grad=False)
        if node.attr == "values" and base.op == "sequence" and base.args:
            return base.args[0]
        if node.attr in TRANSPARENT_ATTRIBUTES:
            return base.but(node=node, **({"grad": False} if node.attr == "data" else {}))
        if node.attr in ("shape", "ndim", "itemsize"):
            return Value("size", node=node, host=True, grad=False, low=0.0)
        made = named_value(dotted or node.attr, node)
        grad = made.grad and (base.grad or base.op in ("name", "unknown"))
        return made.but(names=made.names | base.names, host=base.host, grad=grad)

    # --- operators ----------------------------------------------------------------------------------------------

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        return self.binary(type(node.op), left, right, node)

    def binary(self, operator: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
        if isinstance(getattr(left, "node", None), ast.Constant) and left.low == -inf and left.high == inf:
            return Value("unknown", node=node, host=True, grad=False)  # a string
        op = BINARY.get(operator, "unknown")
        one, other = (left.constant, right.constant) if left.host and right.host else (None, None)
        if one is not None and other is not None and op in ("add", "sub", "mul", "div", "pow"):
            return _folded(op, one, other, node)
        return self.operation(op, (left, right), {}, node)

    def _unary(self, node: ast.UnaryOp) -> Value:
        operand = self.value(node.operand)
        if isinstance(node.op, ast.USub):
            if operand.op == "const":
                return number(-operand.low, node) if operand.low == operand.high else operand
            return self.operation("neg", (operand,), {}, node)
        if isinstance(node.op, ast.Invert):
            return operand.but(node=node)
        return operand if isinstance(node.op, ast.UAdd) else Value("unknown", node=node, host=operand.host)

    def _compare(self, node: ast.Compare) -> Value:
        left = self.value(node.left)
        rights = tuple(self.value(right) for right in node.comparators)
        op = {ast.Eq: "eq", ast.NotEq: "ne", ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le"}.get(
            type(node.ops[0])
        )
        return self.operation(op, (left, *rights), {}, node) if op else Value("unknown", node=node, host=True)

    def _either(self, node: ast.BoolOp) -> Value:
        values = [self.value(part) for part in node.values]
        names = frozenset[str]().union(*(value.names for value in values))
        return Value("unknown", node=node, names=names, sanitised=True, host=all(value.host for value in values))

    def _conditional(self, node: ast.IfExp) -> Value:
        self.value(node.test)
        outside = self.context
        self.context = self.behind(node.test)
        then, otherwise = self.value(node.body), self.value(node.orelse)
        self.context = outside
        return join(then, otherwise)

    def behind(self, test: ast.expr) -> Context:
        """The context of code that runs depending on this condition."""
        tested = tested_names(test)
        for name in list(tested):  # checking a value also checks what it was computed from
            if found := self.scope.find(name):
                tested |= found.names
        return replace(self.context, tested=self.context.tested | tested)

    def _subscript(self, node: ast.Subscript) -> Value:
        base, index = self.value(node.value), self.value(node.slice)
        if base.op == "ref":
            return base
        if base.op == "sequence" and index.constant is not None and 0 <= index.constant < len(base.args):
            return base.args[int(index.constant)]
        if base.op in ("size", "const"):
            return Value("size", node=node, host=True, grad=False, low=0.0)
        selected = base.but(node=node, names=base.names | index.names)
        if index.is_mask:
            made = Value(
                "boolean_index", (base, index), node=node, names=selected.names, grad=base.grad, host=base.host
            )
            surface = base.spelling | index.spelling
            made = made.but(low=base.low, high=base.high, dtype=base.dtype, surface=surface, sanitised=True)
            self.check(made, self.context)
            return made
        return selected

    # --- containers and inner functions -------------------------------------------------------------------------

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        outside_scope, outside = self.scope, self.context
        self.scope = Scope(self.scope)
        for generator in node.generators:
            self.assign(generator.target, element_of(self.value(generator.iter)))
            for test in generator.ifs:
                self.value(test)
                self.context = self.behind(test)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.value(part)
        self.scope, self.context = outside_scope, outside
        return Value("unknown", node=node)

    def _lambda(self, node: ast.Lambda) -> Value:
        outside = self.scope
        self.scope = Scope(self.scope, {arg.arg: named_value(arg.arg) for arg in node.args.args})
        self.value(node.body)
        self.scope = outside
        return Value("unknown", node=node)

    def _named_expression(self, node: ast.NamedExpr) -> Value:
        made = self.value(node.value)
        self.assign(node.target, made)
        return made

    def _sequence(self, node: ast.Tuple | ast.List) -> Value:
        parts = tuple(self.value(part) for part in node.elts)
        names = frozenset[str]().union(*(part.names for part in parts))
        dtype = "bool" if any(part.dtype == "bool" for part in parts) else ""
        return Value("sequence", parts, node=node, names=names, host=True, dtype=dtype)

    # --- assignment ---------------------------------------------------------------------------------------------

    def assign(self, target: ast.AST, value: Value) -> None:
        if isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.args if value.op == "sequence" and len(value.args) == len(target.elts) else None
            for index, part in enumerate(target.elts):
                self.assign(part, parts[index] if parts else self._part(value, index))
        elif isinstance(target, ast.Subscript):
            self._assign_elements(target, value)
        elif dotted := dotted_name(target):
            known = named_value(dotted)
            if value.op in ("unknown", "call", "name", "join") and known.op in ("eps", "mask") and not value.host:
                op = known.op if value.op != "join" else "join"
                value = value.but(op=op, low=max(value.low, known.low), causal=known.causal or value.causal)
            self.scope.names[dotted] = value

    @staticmethod
    def _part(value: Value, index: int) -> Value:
        if value.op in ("max", "min", "sort", "topk") or (value.op == "call" and value.args):
            return value if index == 0 or value.op == "call" else Value("int", grad=False, names=value.names)
        return value

    def _assign_elements(self, target: ast.Subscript, value: Value) -> None:
        """`x[mask] = v` replaces elements of x: its bounds are no longer known."""
        index = self.value(target.slice)
        owner = dotted_name(target.value)
        before = self.scope.find(owner) if owner else None
        if before is None or before.op == "ref":
            self.value(target.value)
            return
        minus_inf = value.low == value.high == -inf
        if index.is_mask:  # the same as masked_fill, with the same problem
            self.check(Value("masked_fill", (before, index, value), node=target), self.context)
        masked = before.masked or (minus_inf and index.is_mask and not index.causal)
        self.scope.names[owner] = before.but(zero="", sanitised=True, low=-inf, high=inf, masked=masked)


def element_of(iterable: Value) -> Value:
    return Value("element", (iterable,), host=iterable.host and iterable.op != "sequence", names=iterable.names)


def _folded(op: str, left: float, right: float, node: ast.AST) -> Value:
    try:
        result = {"add": left + right, "sub": left - right, "mul": left * right}.get(op)
        if result is None:
            result = left / right if op == "div" else left**right
        return number(float(result), node)
    except (ArithmeticError, TypeError, ValueError):  # a complex power, an overflow, a division of literals by 0
        return Value("const", node=node, host=True, grad=False)


_NAN = Value("const", ref="nan", host=True, grad=False)
_CONSTANTS = {
    **dict.fromkeys(("torch.inf", "math.inf", "numpy.inf"), number(inf)),
    **dict.fromkeys(("torch.nan", "math.nan", "numpy.nan", "numpy.NaN"), _NAN),
    "math.pi": number(pi),
}
_BUILTINS = words(
    "max min abs float int len sum pow round range zip enumerate "
    "list tuple dict set sorted map any all str bool isinstance getattr print super"
)
_HANDLERS: dict[type, Callable[[Evaluator, Any], Value]] = {
    ast.Constant: Evaluator._constant, ast.Name: Evaluator._name, ast.Attribute: Evaluator._attribute, ast.BinOp: Evaluator._binary,
    ast.UnaryOp: Evaluator._unary, ast.Compare: Evaluator._compare, ast.BoolOp: Evaluator._either, ast.IfExp: Evaluator._conditional,
    ast.Subscript: Evaluator._subscript, ast.Call: Evaluator._call, ast.ListComp: Evaluator._comprehension,
    ast.SetComp: Evaluator._comprehension, ast.GeneratorExp: Evaluator._comprehension, ast.DictComp: Evaluator._comprehension,
    ast.Lambda: Evaluator._lambda, ast.NamedExpr: Evaluator._named_expression, ast.Tuple: Evaluator._sequence,
    ast.List: Evaluator._sequence,
}  # fmt: skip
