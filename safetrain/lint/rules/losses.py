"""ST45x: losses called with probabilities instead of logits, or the reverse."""

from __future__ import annotations

from ..context import Context
from ..rule import value_rule
from ..value import Value


@value_rule(
    "ST451",
    "binary cross-entropy of a sigmoid output",
    on=("binary_cross_entropy",),
    why="The sigmoid rounds to exactly 0 or 1, where the log is cut off at -100 and the gradient is lost; under autocast it raises an error.",
    safe="F.binary_cross_entropy_with_logits(logits, target), nn.BCEWithLogitsLoss, or safetrain.safe.bce.",
    bad="""
        import torch
        import torch.nn.functional as F

        def loss(logits, target):
            return F.binary_cross_entropy(torch.sigmoid(logits), target)
        """,
    good="""
        import torch.nn.functional as F

        def loss(logits, target):
            return F.binary_cross_entropy_with_logits(logits, target)
        """,
)
def bce_of_sigmoid(value: Value, context: Context) -> str | None:
    given = value.args[0].op
    return f"binary_cross_entropy of a {given} output" if given in ("sigmoid", "softmax") else None


EXPECTS_LOGITS = {"cross_entropy", "binary_cross_entropy_with_logits"}


@value_rule(
    "ST452",
    "probabilities given to a loss that expects logits or log-probabilities",
    on=("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "kl_div"),
    why="The loss applies its own (log-)softmax or sigmoid: applied twice it saturates and the gradients vanish; without the log it is not a likelihood.",
    safe="Pass the raw logits to cross_entropy and binary_cross_entropy_with_logits, and F.log_softmax to nll_loss and kl_div.",
    bad="""
        import torch
        import torch.nn.functional as F

        def loss(logits, target):
            return F.cross_entropy(torch.softmax(logits, dim=-1), target)
        """,
    good="""
        import torch.nn.functional as F

        def loss(logits, target):
            return F.cross_entropy(logits, target)
        """,
)
def probabilities_for_logits(value: Value, context: Context) -> str | None:
    given = value.args[0].op
    wanted = "logits" if value.op in EXPECTS_LOGITS else "log-probabilities"
    if given in ("sigmoid", "softmax"):
        return f"{value.op} expects {wanted}, and is given a {given} output"
    return None
