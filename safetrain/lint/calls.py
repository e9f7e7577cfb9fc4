"""Calls: resolves imports, and maps methods, functions and modules to one form of each operation."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from . import operations, vocabulary
from .context import DTYPES, Context, dotted_name, last_name
from .events import Block, Event, event_of
from .scope import Scope
from .value import Value, number

# The namespaces of torch's functions; what follows the last dot is the operation.
FUNCTION_HOMES = [
    f"torch.{home}" for home in ("nn.functional.", "linalg.", "special.", "Tensor.", "functional.", "_C._nn.", "")
]
# What an instance of these modules computes when it is called.
MODULES = {
    "Sigmoid": "sigmoid", "Softmax": "softmax", "LogSoftmax": "log_softmax", "ReLU": "relu", "Tanh": "tanh", "Softplus": "softplus",
    "BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss", "MSELoss": "mse_loss", "L1Loss": "l1_loss", "SmoothL1Loss": "smooth_l1_loss", "KLDivLoss": "kl_div",
    "HuberLoss": "huber_loss", "LogSigmoid": "logsigmoid", "Linear": "linear", "Conv2d": "conv2d", "Conv1d": "conv1d",
    "CTCLoss": "ctc_loss", "GaussianNLLLoss": "gaussian_nll_loss", "PoissonNLLLoss": "poisson_nll_loss", "ReLU6": "relu",
}  # fmt: skip
# Methods of a module that return the module.
CONVERSIONS = frozenset({"half", "bfloat16", "to", "float", "double", "cuda", "cpu", "eval", "train"})
NUMBERS = ("math.", "numpy.", "builtins.", "random.", "statistics.", "scipy.")


class Calls(ABC):
    """Evaluates calls, and passes each operation to `check` once it is known."""

    def __init__(self, check: Callable[[Value, Context], None]) -> None:
        self.check = check
        self.scope = Scope()
        self.context = Context()
        self.events: list[Event] = []
        self.blocks: tuple[Block, ...] = ()
        self.called: set[str] = set()
        self.routine = ""
        """Name of the function that is walked, `Class.method` of a method."""
        self.summary: Callable[[str], Value | None] = lambda name: None
        """What a function of the user's returns, or the `forward` of a class, by its dotted name."""

    @abstractmethod
    def value(self, node: ast.expr | None) -> Value: ...

    @abstractmethod
    def assign(self, target: ast.AST, value: Value) -> None: ...

    def operation(
        self, op: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, ref: str = ""
    ) -> Value:
        if op in vocabulary.NEEDS_TWO:  # so that rules can rely on two arguments
            args = (*args, kwargs["other"]) if len(args) == 1 and "other" in kwargs else args[:2]
            op = op if len(args) == 2 else "call"
        made = operations.apply(Value(op, args, kwargs, node, ref))
        given = kwargs.get("dtype")
        if given is not None and given.ref.startswith("torch."):
            made = made.but(dtype=DTYPES.get(given.ref.removeprefix("torch."), made.dtype))
        if self.context.autocast in ("half", "bf16") and op in vocabulary.CAST_TO_HALF and not made.host:
            made = made.but(dtype=self.context.autocast)
        if not made.host or op in ("mul", "eq", "ne", "item", "tolist", "numpy"):
            self.check(made, self.context)
        return made

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
        if self.summary(f"{name}.forward") is not None:
            return Value("instance", args, kwargs, node, ref=name, grad=False)
        made = self.operation("call", args, kwargs, node, ref=name)
        own = f"{self.routine.partition('.')[0]}.{name.removeprefix('self.')}" if name.startswith("self.") else name
        return self._summarised(made, own).but(names=made.names | {name})

    def _summarised(self, made: Value, name: str) -> Value:
        """With what is known of the function that was called."""
        known = self.summary(name)
        if known is None:
            return made
        grad = made.grad or any(arg.op == "name" for arg in made.args)
        return made.but(op=known.op, low=known.low, high=known.high, zero=known.zero, dtype=known.dtype, grad=grad)

    def _is_attribute(self, func: ast.Attribute) -> bool:
        """Whether `a.b(…)` calls something stored as `a.b`, such as `self.loss`, and not a method of `a`."""
        dotted = dotted_name(func)
        return bool(dotted) and (
            (dotted.startswith("self.") and dotted.count(".") == 1) or self.scope.find(dotted) is not None
        )

    def _method(
        self, name: str, owner: Value, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call
    ) -> Value:
        op = vocabulary.canonical(name)
        if owner.op == "instance" and name in CONVERSIONS:
            return self._view(op, owner, args, kwargs, node) if op in vocabulary.VIEWS else owner
        if op in ("topk", "sort") and not owner.host:
            return self._torch(op, (owner, *args), kwargs, node)
        if (op not in vocabulary.METHODS and op not in operations.TRANSFERS) or not vocabulary.fits_method(
            op, len(args)
        ):
            if name in ("size", "dim", "numel", "nelement", "stride"):
                kind = "numel" if name in ("numel", "nelement") else "size"
                return Value(kind, node=node, host=True, grad=False, low=0.0)
            return self.operation("call", (owner, *args), kwargs, node, ref=name)
        if op in vocabulary.VIEWS:
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
        return owner.but(
            node=node, op="mask" if is_mask else owner.op, dtype=dtype, grad=grad, unsafe=owner.unsafe if grad else ()
        )

    def _function(self, dotted: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        if dotted.startswith("torch.nn.") and dotted.rpartition(".")[2][:1].isupper() and "functional" not in dotted:
            return Value("instance", args, kwargs, node, ref=dotted.rpartition(".")[2], grad=False)
        if dotted.startswith("torch."):
            home = next(home for home in FUNCTION_HOMES if dotted.startswith(home))
            rest = dotted.removeprefix(home)
            if rest in ("finfo", "iinfo"):
                return Value("finfo", node=node, host=True, grad=False)
            if "." not in rest and not rest.startswith(
                ("autocast", "no_grad", "inference_mode", "set_grad", "enable_grad")
            ):
                if "input" in kwargs:
                    args = (kwargs["input"], *args)
                return self._torch(vocabulary.canonical(rest), args, kwargs, node)
        if dotted.startswith("builtins."):
            return self._builtin(dotted.removeprefix("builtins."), args, kwargs, node)
        if dotted.startswith(NUMBERS):
            return Value("host", args, kwargs, node, ref=dotted, host=True, grad=False)
        if self.summary(f"{dotted}.forward") is not None:
            return Value("instance", args, kwargs, node, ref=dotted, grad=False)
        return self._summarised(self.operation("call", args, kwargs, node, ref=dotted), dotted)

    def _torch(self, op: str, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.Call) -> Value:
        if op in vocabulary.VIEWS and args:
            return self._view(op, args[0], args[1:], kwargs, node)
        if op in ("topk", "sort") and args:
            return Value("sequence", (args[0].but(node=node), Value("int", grad=False)), node=node, host=True)
        if op in operations.TRANSFERS and not args:
            if op in ("rand", "clamp"):
                return Value(op, node=node)
            return self.operation("call", args, kwargs, node, ref=op)
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
        return self._summarised(self.operation("call", args, kwargs, node, ref=module.ref), f"{module.ref}.forward")

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
        # Python's sum of a tensor's rows
        is_sum_of_rows = name == "sum" and len(args) == 1 and args[0].op in ("square", "exp", "mul", "abs")
        if is_sum_of_rows or (name == "pow" and len(args) == 2):
            return self.operation(name, args, kwargs, node)
        if name in ("float", "int", "len", "round"):
            made = Value("size", args, node=node, host=True, grad=False, low=0.0 if name == "len" else -inf)
            counted = args[0] if args and name != "len" else made
            return made.but(zero=counted.zero, names=counted.names)
        names = frozenset[str]().union(*(arg.names for arg in args)) if args else frozenset[str]()
        return Value("call", args, kwargs, node, ref=f"builtins.{name}", names=names)
