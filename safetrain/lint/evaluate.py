"""From a syntax tree to values: names are looked up, imports resolved, methods and functions brought to one form."""

from __future__ import annotations

import ast
from collections.abc import Callable
from math import inf

from . import operations
from .context import DTYPES, Context, dotted_name, tested_names
from .events import Block, Event, event_of
from .value import UNKNOWN, Value, named_value, number, reference

# Where torch keeps its functions; what follows the last dot is the operation.
FUNCTION_HOMES = ("torch.nn.functional.", "torch.linalg.", "torch.special.", "torch.Tensor.", "torch.functional.", "torch._C._nn.", "torch.")
# What an instance of these modules computes when it is called.
MODULES = {
    "Sigmoid": "sigmoid", "Softmax": "softmax", "LogSoftmax": "log_softmax", "ReLU": "relu", "Tanh": "tanh", "Softplus": "softplus",
    "BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss", "MSELoss": "mse_loss", "L1Loss": "l1_loss", "SmoothL1Loss": "smooth_l1_loss", "KLDivLoss": "kl_div",
    "HuberLoss": "huber_loss", "LogSigmoid": "logsigmoid", "Linear": "linear", "Conv2d": "conv2d", "Conv1d": "conv1d",
    "CTCLoss": "ctc_loss", "GaussianNLLLoss": "gaussian_nll_loss", "PoissonNLLLoss": "poisson_nll_loss", "ReLU6": "relu",
}  # fmt: skip
BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Pow: "pow",
    ast.MatMult: "matmul", ast.BitAnd: "logical_and", ast.BitOr: "logical_or", ast.Mod: "mod",
}  # fmt: skip
TRANSPARENT_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "values", "data", "real"})
NUMBERS = ("math.", "numpy.", "builtins.", "random.", "statistics.", "scipy.")


class Scope:
    """Values by name, dotted names such as `self.scale` included; unknown names are looked up in the parent."""

    def __init__(self, parent: Scope | None = None, names: dict[str, Value] | None = None) -> None:
        self.parent = parent
        self.names = {} if names is None else names

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


class Evaluator:
    """Evaluates expressions in a scope and hands each operation to `check` once it is known."""

    def __init__(self, check: Callable[[Value, Context], None]) -> None:
        self.check = check
        self.scope = Scope()
        self.context = Context()
        self.events: list[Event] = []
        self.blocks: tuple[Block, ...] = ()
        self.called: set[str] = set()

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

    def operation(self, op: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, ref: str = "") -> Value:
        if op in operations.NEEDS_TWO:  # rules may then rely on two arguments
            args = (*args, kwargs["other"]) if len(args) == 1 and "other" in kwargs else args[:2]
            op = op if len(args) == 2 else "call"
        made = operations.apply(Value(op, args, kwargs, node, ref))
        given = kwargs.get("dtype")
        if given is not None and given.ref.startswith("torch."):
            made = made.but(dtype=DTYPES.get(given.ref.removeprefix("torch."), made.dtype))
        if self.context.autocast in ("half", "bf16") and op in operations.CAST_TO_HALF and not made.host:
            made = made.but(dtype=self.context.autocast)
        if not made.host or op in ("mul", "eq", "ne", "item", "tolist", "numpy"):
            self.check(made, self.context)
        return made

    # --- names and literals -------------------------------------------------------------------------------------

    def _constant(self, node: ast.Constant) -> Value:
        if isinstance(node.value, (int, float)):
            try:
                return number(node.value, node)
            except OverflowError:  # an integer beyond every float
                return Value("const", node=node, host=True, grad=False)
        return Value("const", node=node, ref=repr(node.value) if isinstance(node.value, str) else "", host=True, grad=False)

    def _name(self, node: ast.Name) -> Value:
        found = self.scope.find(node.id)
        if found is not None:
            return found if found.op == "ref" else found.but(node=node).named(node.id)
        if node.id in _BUILTINS:
            return reference(f"builtins.{node.id}")
        if node.id == "F":  # by custom, even where it comes from a star import
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
        return made.but(names=made.names | base.names, host=base.host, grad=made.grad and (base.grad or base.op in ("name", "unknown")))

    # --- operators ----------------------------------------------------------------------------------------------

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        return self.binary(type(node.op), left, right, node)

    def binary(self, operator: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
        if isinstance(getattr(left, "node", None), ast.Constant) and left.low == -inf and left.high == inf:
            return Value("unknown", node=node, host=True, grad=False)  # text
        op = BINARY.get(operator, "unknown")
        both = left.host and right.host
        if both and left.constant is not None and right.constant is not None and op in ("add", "sub", "mul", "div", "pow"):
            return _folded(op, left.constant, right.constant, node)
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
        op = {ast.Eq: "eq", ast.NotEq: "ne", ast.Gt: "gt", ast.GtE: "ge", ast.Lt: "lt", ast.LtE: "le"}.get(type(node.ops[0]))
        return self.operation(op, (left, *rights), {}, node) if op else Value("unknown", node=node, host=True)

    def _either(self, node: ast.BoolOp) -> Value:
        values = [self.value(part) for part in node.values]
        names = frozenset[str]().union(*(value.names for value in values))
        return Value("unknown", node=node, names=names, sanitised=True, host=all(value.host for value in values))

    def _conditional(self, node: ast.IfExp) -> Value:
        from .value import join

        self.value(node.test)
        outside = self.context
        self.context = self.behind(node.test)
        then, otherwise = self.value(node.body), self.value(node.orelse)
        self.context = outside
        return join(then, otherwise)

    def behind(self, test: ast.expr) -> Context:
        """The context of code that this test decides about."""
        from dataclasses import replace

        tested = tested_names(test)
        for name in list(tested):  # what a tested name was computed from has been looked at as well
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
            made = Value("boolean_index", (base, index), node=node, low=base.low, high=base.high, dtype=base.dtype, names=selected.names)
            made = made.but(surface=base.spelling | index.spelling)
            made = made.but(grad=base.grad, sanitised=True, host=base.host)
            self.check(made, self.context)
            return made
        return selected

    # --- calls --------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Value:
        args = tuple(self.value(arg.value if isinstance(arg, ast.Starred) else arg) for arg in node.args)
        kwargs = {keyword.arg or "**": self.value(keyword.value) for keyword in node.keywords}
        made = self._called(node, args, kwargs)
        self.called.add(last_name(node.func))
        event = event_of(node, made, self.blocks)
        if event is not None:
            self.events.append(event)
        return made

    def _called(self, node: ast.Call, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        func = node.func
        if isinstance(func, ast.Attribute):
            owner = self.value(func.value)
            if owner.op != "ref" and not self._is_attribute(func):
                return self._method(func.attr, owner, args, kwargs, node)
        callee = self.value(func)
        if callee.op == "ref":
            return self._function(callee.ref, args, kwargs, node)
        if callee.op == "instance":
            return self._module_call(callee, args, kwargs, node)
        name = dotted_name(func)
        return self.operation("call", args, kwargs, node, ref=name).named(name)

    def _is_attribute(self, func: ast.Attribute) -> bool:
        """Whether `a.b(…)` calls something stored as `a.b`, such as `self.loss`, and is no method of `a`."""
        dotted = dotted_name(func)
        return bool(dotted) and ((dotted.startswith("self.") and dotted.count(".") == 1) or self.scope.find(dotted) is not None)

    def _method(self, name: str, owner: Value, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        op = operations.canonical(name)
        if owner.op == "instance" and name in ("half", "bfloat16", "to", "float", "double", "cuda", "cpu", "eval", "train"):
            return self._view(op, owner, args, kwargs, node) if op in operations.VIEWS else owner
        if op in ("topk", "sort") and not owner.host:
            return self._torch(op, (owner, *args), kwargs, node)
        if (op not in operations.METHODS and op not in operations.TRANSFERS) or not operations.fits_method(op, len(args)):
            if name in ("size", "dim", "numel", "nelement", "stride"):
                return Value("numel" if name in ("numel", "nelement") else "size", node=node, host=True, grad=False, low=0.0)
            return self.operation("call", (owner, *args), kwargs, node, ref=name)
        if op in operations.VIEWS:
            return self._view(op, owner, args, kwargs, node)
        if op == "where" and args:  # x.where(condition, other)
            made = self.operation(op, (args[0], owner, *args[1:]), kwargs, node)
        else:
            made = self._torch(op, (owner, *args), kwargs, node)
        if name.endswith("_") and isinstance(node.func, ast.Attribute):
            self.assign(node.func.value, made)
        return made

    def _view(self, op: str, owner: Value, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST) -> Value:
        dtype = {"half": "half", "bfloat16": "bf16", "float": "float", "double": "float"}.get(op, owner.dtype)
        for given in (*args, *kwargs.values()):
            if given.ref.startswith("torch."):
                dtype = DTYPES.get(given.ref.removeprefix("torch."), dtype)
        grad = owner.grad and op != "detach" and dtype not in ("int", "bool")
        is_mask = owner.is_mask and dtype != "bool"
        return owner.but(node=node, op="mask" if is_mask else owner.op, dtype=dtype, grad=grad, unsafe=owner.unsafe if grad else ())

    def _function(self, dotted: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        if dotted.startswith("torch.nn.") and dotted.rpartition(".")[2][:1].isupper() and "functional" not in dotted:
            return Value("instance", args, kwargs, node, ref=dotted.rpartition(".")[2], grad=False)
        if dotted.startswith("torch."):
            home = next(home for home in FUNCTION_HOMES if dotted.startswith(home))
            rest = dotted.removeprefix(home)
            if rest in ("finfo", "iinfo"):
                return Value("finfo", node=node, host=True, grad=False)
            if "." not in rest and not rest.startswith(("autocast", "no_grad", "inference_mode", "set_grad", "enable_grad")):
                if "input" in kwargs:
                    args = (kwargs["input"], *args)
                return self._torch(operations.canonical(rest), args, kwargs, node)
        if dotted.startswith("builtins."):
            return self._builtin(dotted.removeprefix("builtins."), args, kwargs, node)
        if dotted.startswith(NUMBERS):
            return Value("host", args, kwargs, node, ref=dotted, host=True, grad=False)
        return self.operation("call", args, kwargs, node, ref=dotted)

    def _torch(self, op: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        if op in operations.VIEWS and args:
            return self._view(op, args[0], args[1:], kwargs, node)
        if op in ("topk", "sort") and args:
            return Value("sequence", (args[0].but(node=node), Value("int", grad=False)), node=node, host=True)
        if op in operations.TRANSFERS and not args:
            return self.operation("call", args, kwargs, node, ref=op) if op not in ("rand", "clamp") else Value(op, node=node)
        if op in ("max", "min") and len(args) > 1:
            op, args = (op, args[:1]) if args[1].host else (op + "imum", args)
        if op == "add" and len(args) > 1 and "alpha" in kwargs:
            op = "call"
        return self.operation(op, args, kwargs, node, ref=f"torch.{op}")

    def _module_call(self, module: Value, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        if module.ref == "Sequential" and module.args:
            last = module.args[-1]
            inner = self.operation("call", args, {}, node, ref="Sequential")
            return self._module_call(last, (inner,), {}, node) if last.op == "instance" else inner
        op = MODULES.get(module.ref)
        if op and args:
            return self.operation(op, args, kwargs, node, ref=f"torch.{op}")
        return self.operation("call", args, kwargs, node, ref=module.ref)

    def _builtin(self, name: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        if name == "float" and args and args[0].ref:
            text = args[0].ref.strip("'").lower().lstrip("+")
            if text in ("inf", "-inf", "infinity", "-infinity"):
                return number(-inf if text.startswith("-") else inf, node)
            return Value("const", node=node, host=True, grad=False, ref="nan" if text.lstrip("-") == "nan" else "")
        if name in ("max", "min") and len(args) > 1:
            return self.operation(name + "imum", args, kwargs, node)
        if name == "abs" and len(args) == 1:
            return self.operation("abs", args, kwargs, node)
        if name == "pow" and len(args) == 2:
            return self.operation("pow", args, kwargs, node)
        if name in ("float", "int", "len", "round"):
            made = Value("size", args, node=node, host=True, grad=False, low=0.0 if name == "len" else -inf)
            counted = args[0] if args and name != "len" else made
            return made.but(zero=counted.zero, names=counted.names)
        names = frozenset[str]().union(*(arg.names for arg in args)) if args else frozenset[str]()
        return Value("call", args, kwargs, node, ref=f"builtins.{name}", names=names)

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
        names = frozenset[str]().union(*(part.names for part in parts)) if parts else frozenset[str]()
        return Value("sequence", parts, node=node, names=names, host=True, dtype="bool" if any(p.dtype == "bool" for p in parts) else "")

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
                value = value.but(op=known.op if value.op != "join" else "join", low=max(value.low, known.low), causal=known.causal or value.causal)
            self.scope.names[dotted] = value

    @staticmethod
    def _part(value: Value, index: int) -> Value:
        if value.op in ("max", "min", "sort", "topk") or (value.op == "call" and value.args):
            return value if index == 0 or value.op == "call" else Value("int", grad=False, names=value.names)
        return value

    def _assign_elements(self, target: ast.Subscript, value: Value) -> None:
        """`x[mask] = v` replaces elements of x: what was known of them is no longer certain."""
        index = self.value(target.slice)
        owner = dotted_name(target.value)
        before = self.scope.find(owner) if owner else None
        if before is None or before.op == "ref":
            self.value(target.value)
            return
        minus_inf = value.low == value.high == -inf
        after = before.but(zero="", sanitised=True, low=-inf, high=inf, masked=before.masked or (minus_inf and index.is_mask and not index.causal))
        self.scope.names[owner] = after


def last_name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


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


_INFINITIES = {"torch.inf": inf, "math.inf": inf, "numpy.inf": inf}
_CONSTANTS = {
    **{name: number(value) for name, value in _INFINITIES.items()},
    **{name: Value("const", ref="nan", host=True, grad=False) for name in ("torch.nan", "math.nan", "numpy.nan", "numpy.NaN")},
    "math.pi": number(3.141592653589793),
}
_BUILTINS = frozenset("max min abs float int len sum pow round range zip enumerate list tuple dict set sorted map any all str bool isinstance getattr print super".split())
_HANDLERS: dict[type, Callable[[Evaluator, ast.expr], Value]] = {
    ast.Constant: Evaluator._constant, ast.Name: Evaluator._name, ast.Attribute: Evaluator._attribute, ast.BinOp: Evaluator._binary,
    ast.UnaryOp: Evaluator._unary, ast.Compare: Evaluator._compare, ast.BoolOp: Evaluator._either, ast.IfExp: Evaluator._conditional,
    ast.Subscript: Evaluator._subscript, ast.Call: Evaluator._call, ast.ListComp: Evaluator._comprehension,
    ast.SetComp: Evaluator._comprehension, ast.GeneratorExp: Evaluator._comprehension, ast.DictComp: Evaluator._comprehension,
    ast.Lambda: Evaluator._lambda, ast.NamedExpr: Evaluator._named_expression, ast.Tuple: Evaluator._sequence,
    ast.List: Evaluator._sequence,
}  # type: ignore[dict-item]  # fmt: skip
