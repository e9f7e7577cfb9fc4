"""ST5xx: overflow and rounding in half precision."""

from __future__ import annotations

import ast
import re

from ..context import Context
from ..rule import value_rule
from ..value import HALF_ROUNDS_TO_ZERO, Value
from ..vocabulary import LOSSES
from .evidence import in_half

CRITERION = re.compile(r"(^|_)(criterion|loss|loss_fn|loss_func|lossfn|loss_function|compute_loss|objective)$", re.I)
MODEL = re.compile(r"model|(^|[._])net(work)?$", re.I)


@value_rule(
    "ST501",
    "loss computed under autocast without .float()",
    on=(*sorted(LOSSES), "call", "assign"),
    why="Logits leave the model in half precision: above 65504 they are inf, bf16 keeps three digits, and CPU autocast keeps softmax, exp and sum in half.",
    safe="Convert first, loss_fn(logits.float(), target), or compute the loss after the autocast block.",
    bad="""
        import torch
        import torch.nn.functional as F

        def step(model, x, y):
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits, y)
            return loss
        """,
    good="""
        import torch
        import torch.nn.functional as F

        def step(model, x, y):
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits.float(), y)
            return loss
        """,
)
def loss_under_autocast(value: Value, context: Context) -> str | None:
    if not context.autocast or context.no_grad or not value.args:
        return None
    if value.op == "assign":
        made = value.args[0]
        by_hand = (
            made.op in ("mean", "sum")
            and re.search(r"(^|_)loss$", value.ref, re.I)
            and made.dtype != "float"
            and made.grad
        )
        if by_hand and not re.search("loss", " ".join(_callees(made)), re.I):
            return "a hand-written loss under autocast is computed in half precision"
        return None
    given = _positional(value)
    if value.op == "call" and not (CRITERION.search(value.ref.rpartition(".")[2]) and len(given) > 1):
        return None
    if not given or given[0].dtype == "float" or given[0].host or MODEL.search(" ".join(given[0].labels)):
        return None  # in `loss_fn(model, batch)` the first argument is not logits
    return "loss under autocast of logits that were not converted with .float()"


def _positional(value: Value) -> tuple[Value, ...]:
    """The arguments without the object of a method."""
    num_written = len(value.node.args) if isinstance(value.node, ast.Call) else len(value.args)
    return value.args[len(value.args) - num_written :] if value.op == "call" else value.args


def _callees(value: Value) -> list[str]:
    return [
        value.ref,
        *(name for arg in value.args for name in _callees(arg) if arg.op in ("call", "sum", "mean", *LOSSES)),
    ]


@value_rule(
    "ST502",
    "eps that is 0 in half precision",
    on=("log", "log2", "log10", "div", "sqrt", "rsqrt", "reciprocal", "pow"),
    why="fp16's smallest number is 6e-8: 1e-8 and 1e-12 round to 0 and have no effect.",
    safe="x.float() before, an eps of at least 1e-6 (1e-4 under a division), or safetrain.safe.log / div, which adapt to the dtype.",
    bad="""
        import torch

        def entropy(probs):
            probs = probs.half()
            return -(probs * torch.log(probs + 1e-12)).sum(-1)
        """,
    good="""
        import torch

        def entropy(probs):
            probs = probs.float()
            return -(probs * torch.log(probs + 1e-12)).sum(-1)
        """,
)
def eps_vanishes(value: Value, context: Context) -> str | None:
    operand = value.args[1] if value.op == "div" and len(value.args) > 1 else value.args[0]
    if operand.op not in ("add", "clamp", "clamp_min", "maximum") or not in_half(operand, context):
        return None
    guards = [*operand.args[1:], *operand.kwargs.values(), *operand.args[:1]]
    tiny = next(
        (guard.constant for guard in guards if guard.constant and 0 < guard.constant < HALF_ROUNDS_TO_ZERO), None
    )
    return f"the eps {tiny:g} is 0 in half precision, so it does not protect this {value.op}" if tiny else None


@value_rule(
    "ST503",
    "Adam in half precision with an eps that is 0",
    on=("call",),
    why="Adam divides by sqrt(v) + eps; with half-precision weights both round to 0 and the update is 0 / 0.",
    safe="Keep the weights in fp32 and use autocast, or pass eps=1e-4.",
    bad="""
        import torch

        def build(inputs, outputs):
            model = torch.nn.Linear(inputs, outputs).half()
            return torch.optim.Adam(model.parameters(), lr=1e-3)
        """,
    good="""
        import torch

        def build(inputs, outputs):
            model = torch.nn.Linear(inputs, outputs)
            return torch.optim.Adam(model.parameters(), lr=1e-3)
        """,
)
def adam_in_half(value: Value, context: Context) -> str | None:
    if not re.fullmatch(r"torch\.optim\.(\w+\.)?(Adam|AdamW|NAdam|RAdam|Adamax)", value.ref) or not value.args:
        return None
    parameters = value.args[0]
    eps = value.kwargs.get("eps")
    if eps is not None and not (eps.constant and eps.constant < HALF_ROUNDS_TO_ZERO):
        return None
    half = parameters.dtype == "half" or (parameters.args and parameters.args[0].dtype == "half")
    return "Adam's eps of 1e-8 is 0 for weights in half precision" if half else None
