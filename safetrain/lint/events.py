"""The calls that make up a training step, in source order."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from .context import dotted_name, last_name
from .value import UNKNOWN, Value

Block = tuple[str, ast.AST]
"""A loop (`loop`), a branch (`if`, `else`) or another block that contains a call."""

OPTIMIZER_NAME = re.compile(r"opt", re.I)
SCALER_NAME = re.compile(r"scaler", re.I)
MANAGED_NAME = re.compile(r"accelerator|fabric|engine|deepspeed|trainer", re.I)
BUILDS = re.compile(r"Adam|SGD|RMSprop|Adagrad|Adadelta|Lion|optimizer_(cls|class)")
CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_"})


@dataclass(frozen=True, eq=False)
class Event:
    kind: str
    """`backward`, `clip`, `unscale`, `step` (optimizer), `scaled_step` (gradient scaler), `zero_grad`, `build` (of an optimizer)."""
    owner: str
    node: ast.Call
    loss: Value = UNKNOWN
    """Of `backward`: the tensor it is called on."""
    scaled: bool = False
    managed: bool = False
    """By accelerate, Fabric or the like, which scale, unscale and divide the loss themselves."""
    blocks: tuple[Block, ...] = ()

    @property
    def loops(self) -> tuple[ast.AST, ...]:
        return tuple(node for kind, node in self.blocks if kind == "loop")


@dataclass
class Routine:
    """The training-loop calls of one function, or of the top level of a file."""

    name: str
    events: list[Event]
    called: set[str]
    """Names of everything it calls, without their modules and objects."""
    neighbours: dict[str, set[str]] = field(default_factory=dict)
    """What each function of the file calls, by the function's name."""

    def of(self, kind: str, *more: str) -> list[Event]:
        return [event for event in self.events if event.kind in (kind, *more)]


def event_of(node: ast.Call, made: Value, blocks: tuple[Block, ...]) -> Event | None:
    func = node.func
    name = last_name(func)
    if BUILDS.match(name):
        return Event("build", "", node, blocks=blocks)
    if name not in _KINDS:
        return None
    owner = _owner(func.value) if isinstance(func, ast.Attribute) else ""
    managed = bool(MANAGED_NAME.search(owner))
    kind = _KINDS[name]
    if kind == "step":
        if SCALER_NAME.search(owner):
            kind = "scaled_step"
        elif not OPTIMIZER_NAME.search(owner) or managed:
            return None
    if kind != "backward":
        return Event(kind, owner, node, managed=managed, blocks=blocks)
    scale = func.value if isinstance(func, ast.Attribute) else None
    scaled = isinstance(scale, ast.Call) and isinstance(scale.func, ast.Attribute) and scale.func.attr == "scale"
    loss = made.args[0] if made.args else UNKNOWN
    if scaled and loss.args:
        loss = loss.args[-1]
    if managed and len(made.args) > 1:
        loss = made.args[1]
    return Event(kind, owner, node, loss, scaled, managed or owner in ("self", "super"), blocks)


_KINDS = {
    "backward": "backward", "manual_backward": "backward", "unscale_": "unscale", "step": "step", "zero_grad": "zero_grad",
    **dict.fromkeys(CLIPS, "clip"),
}  # fmt: skip


def _owner(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _owner(node.value)
    if isinstance(node, ast.Call):
        return _owner(node.func)
    return dotted_name(node)
