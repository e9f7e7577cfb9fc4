"""ST3xx: exponentials that overflow."""

from __future__ import annotations

import re

from ..context import Context, dotted_name
from ..rule import value_rule
from ..value import Value
from .evidence import is_bare_exp, is_exp_sum

LOG_SCALE = re.compile(r"(^|_)log_?(var|std|sigma|scale|sd|variance|sig)s?(_|$)", re.I)


@value_rule(
    "ST301",
    "hand-written softmax without subtracting the maximum",
    on=("div",),
    why="exp overflows above 88 (11 in half): inf / inf is NaN.",
    safe="torch.softmax(x, dim), or safetrain.safe.softmax(x, mask=…) with a mask; subtract x.amax(dim, keepdim=True) first.",
    bad="""
        import torch

        def attention(scores):
            weights = torch.exp(scores)
            return weights / weights.sum(-1, keepdim=True)
        """,
    good="""
        import torch

        def attention(scores):
            return torch.softmax(scores, dim=-1)
        """,
)
def hand_written_softmax(value: Value, context: Context) -> str | None:
    if len(value.args) == 2 and is_exp_sum(_without_eps(value.args[1])):
        return "exp(x) / sum(exp(x)) without the maximum subtracted"
    return None


def _without_eps(value: Value) -> Value:
    if value.op == "add":
        return value.args[0] if value.args[1].low >= 0 else value.args[1] if value.args[0].low >= 0 else value
    return value.args[0] if value.op in ("clamp", "clamp_min") and value.args else value


@value_rule(
    "ST302",
    "hand-written logsumexp or softplus",
    on=("log", "log1p"),
    why="exp overflows above 88 (11 in half), so the log is inf; far below 0 it underflows, so the log is -inf.",
    safe="torch.logsumexp(x, dim) for log(sum(exp(x))), F.softplus(x) for log(1 + exp(x)).",
    bad="""
        import torch

        def log_partition(scores):
            return scores.exp().sum(-1).log()

        def softplus(x):
            return torch.log(1 + torch.exp(x))
        """,
    good="""
        import torch
        import torch.nn.functional as F

        def log_partition(scores):
            return torch.logsumexp(scores, dim=-1)

        def softplus(x):
            return F.softplus(x)
        """,
)
def hand_written_logsumexp(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if value.op == "log1p":
        return "log(1 + exp(x)) by hand" if is_bare_exp(source) else None
    if is_exp_sum(_without_eps(source)) or (source.op in ("sum", "mean") and _has_exp_factor(source.args[0])):
        return "log(sum(exp(x))) by hand"
    if source.op == "add" and any(arg.constant == 1 for arg in source.args) and any(map(is_bare_exp, source.args)):
        return "log(1 + exp(x)) by hand"
    return None


def _has_exp_factor(value: Value) -> bool:
    return is_bare_exp(value) or (value.op in ("mul", "div") and any(_has_exp_factor(arg) for arg in value.args))


@value_rule(
    "ST303",
    "exp of an unbounded log-variance, log-scale or output of a layer",
    on=("exp",),
    why="A network's log-variance is not bounded: one outlier above 88 (11 in half) overflows to inf, in the sample or in the KL term.",
    safe="safetrain.safe.exp(log_var), or exp(log_var.clamp(-30, 20)); softplus for a scale.",
    bad="""
        import torch

        def sample(mean, logvar):
            return mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        """,
    good="""
        import torch

        def sample(mean, logvar):
            return mean + torch.randn_like(mean) * torch.exp(0.5 * logvar.clamp(-30, 20))
        """,
)
def exp_of_log_scale(value: Value, context: Context) -> str | None:
    source = value.args[0]
    while source.op in ("mul", "div", "neg") and source.args:  # 0.5 * logvar
        constants = [arg.host for arg in source.args]
        source = source.args[constants.index(False)] if False in constants else source.args[0]
    if (
        source.op not in ("name", "call", "element", "linear", "sequence", "unknown")
        or source.high < 88
        or source.names & context.tested
    ):
        return None
    if context.no_grad:
        return None
    if source.op == "linear" and source.grad:
        return "exp of the output of a linear layer, which nothing bounds"
    name = next((name for name in sorted(_own_names(source)) if LOG_SCALE.search(name.rpartition(".")[2])), None)
    # A parameter changes slowly; the output of a network changes with its input.
    return f"exp of {name}, which nothing bounds" if name and not name.startswith("self.") else None


def _own_names(value: Value) -> set[str]:
    """The name in this expression, not those it was computed from."""
    name = dotted_name(value.node) if value.node is not None else ""
    return {name} if name else set()
