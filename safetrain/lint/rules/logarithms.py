"""ST1xx: logarithms of values that can be 0."""

from __future__ import annotations

from ..context import Context
from ..rule import value_rule
from ..value import Value
from .evidence import guarded, is_exp_sum

LOGS = ("log", "log2", "log10")


@value_rule(
    "ST101",
    "log of softmax or sigmoid",
    on=LOGS,
    why="A probability below 1e-45 (6e-8 in half) rounds to 0; its log is -inf, and the gradient 0 * inf is NaN.",
    safe="F.log_softmax(x, dim) or safetrain.safe.log_softmax; F.logsigmoid(x) for a sigmoid, F.logsigmoid(-x) for 1 - sigmoid.",
    bad="""
        import torch

        def nll(logits, target):
            probs = torch.softmax(logits, dim=-1)
            return -torch.log(probs).gather(-1, target).mean()
        """,
    good="""
        import torch.nn.functional as F

        def nll(logits, target):
            return -F.log_softmax(logits, dim=-1).gather(-1, target).mean()
        """,
)
def log_of_probability(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if source.op in ("softmax", "sigmoid"):
        return f"{value.op} of {source.op}"
    if source.op == "sub" and source.args[0].constant == 1 and source.args[1].op in ("softmax", "sigmoid"):
        return f"{value.op} of 1 - {source.args[1].op}"
    if source.op == "div" and len(source.args) == 2:
        parts = [arg.op for arg in source.args if arg.op in ("softmax", "sigmoid") and arg.low <= 0]
        return f"{value.op} of a quotient with {parts[0]}" if parts else None
    return None


@value_rule(
    "ST102",
    "log of a value that can be 0",
    on=LOGS,
    why="log(0) is -inf and its gradient is infinite; one such element makes the whole loss or gradient NaN.",
    safe="safetrain.safe.log(x), or log(x.clamp(min=1e-6)); log1p for log(1 + x).",
    bad="""
        import torch

        def log_energy(frames):
            return torch.log(frames.pow(2).sum(-1))
        """,
    good="""
        import torch

        def log_energy(frames):
            return torch.log(frames.pow(2).sum(-1).clamp(min=1e-6))
        """,
)
def log_of_zero(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if not source.zero or guarded(source, context) or is_exp_sum(source) or log_of_probability(value, context):
        return None
    if source.op in ("mean", "nanmean") or (source.op == "sum" and source.low < 0):
        return None  # of unknown sign: most likely positive, such as a mean of likelihoods
    return f"{value.op} of a value that can be 0: {source.zero}"
