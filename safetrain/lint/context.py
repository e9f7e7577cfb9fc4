"""The context of an expression: autocast, no_grad, and the conditions it depends on."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .value import Value
from .vocabulary import words

AUTOCAST = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.cpu.amp.autocast",
    "torch.amp.autocast_mode.autocast",
)
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.grad_mode.no_grad")
# A condition on these does not depend on the values in a tensor.
SHAPE_LIKE = words(
    "dim ndim shape size dtype device is_cuda is_sparse requires_grad training is_complex is_floating_point type"
)


@dataclass(frozen=True)
class Context:
    autocast: str = ""
    """`half` or `bf16` inside autocast, `amp` if its type is not known; empty outside."""
    no_grad: bool = False
    tested: frozenset[str] = frozenset()
    """Names whose values were checked by an enclosing or preceding condition."""


def autocast_type(call: Value) -> str | None:
    """The autocast type that `with call:` enters, '' if it disables autocast; None if the call is not autocast."""
    if call.op != "call" or not (call.ref in AUTOCAST or call.ref.rpartition(".")[2] == "autocast"):
        return None
    enabled = call.kwargs.get("enabled")
    if enabled is not None and enabled.constant == 0:
        return ""
    given = call.arg(1, "dtype")
    if given is not None and given.ref.startswith("torch."):
        return DTYPES.get(given.ref.removeprefix("torch."), "amp")
    device = call.arg(0, "device_type")
    on_cpu = call.ref.startswith("torch.cpu") or (device is not None and device.ref == "'cpu'")
    if given is not None or (device is not None and not device.ref):
        return "amp"
    return "bf16" if on_cpu else "half"


DTYPES = {
    "float16": "half", "half": "half", "bfloat16": "bf16", "float32": "float", "float": "float", "float64": "float", "double": "float",
    "int64": "int", "long": "int", "int32": "int", "int": "int", "int8": "int", "uint8": "int", "bool": "bool", "int16": "int",
}  # fmt: skip


def is_no_grad(value: Value) -> bool:
    return value.ref in NO_GRAD or (
        value.op in ("call", "ref") and value.ref.rpartition(".")[2] in ("no_grad", "inference_mode")
    )


def tested_names(test: ast.expr) -> frozenset[str]:
    """Names whose values this condition depends on; not those of which it checks only the shape, the type, or `is None`."""
    found: set[str] = set()
    pending: list[ast.AST] = [test]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Compare) and any(
            isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops
        ):
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "hasattr", "callable")
        ):
            continue
        if isinstance(node, ast.Attribute):
            if node.attr in SHAPE_LIKE:
                continue
            if dotted := dotted_name(node):
                found.add(dotted)
        if isinstance(node, ast.Name):
            found.add(node.id)
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(found - {"self", "torch", "math", "np"})


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes, '' for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def last_name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
