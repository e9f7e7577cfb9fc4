"""ST2xx: denominators that can be 0, and roots whose derivative is a division by 0."""

from __future__ import annotations

from ..context import Context
from ..operations import singular_operand
from ..rule import value_rule
from ..value import Value
from .evidence import guarded, is_bare_exp, is_exp_sum, is_square_sum, needs_gradient


@value_rule(
    "ST201",
    "division by a value that can be 0",
    on=("div", "reciprocal"),
    why="x / 0 is inf and 0 / 0 is NaN: an empty mask, a padded row or a constant feature is enough.",
    safe="safetrain.safe.div(a, b), or b.clamp(min=eps); for a norm safetrain.safe.normalize, for a masked mean safetrain.safe.masked_mean.",
    bad="""
        def masked_mean(x, mask):
            return (x * mask).sum() / mask.sum()

        def unit(x):
            return x / x.norm(dim=-1, keepdim=True)
        """,
    good="""
        def masked_mean(x, mask):
            return (x * mask).sum() / mask.sum().clamp(min=1)

        def unit(x, eps=1e-6):
            return x / (x.norm(dim=-1, keepdim=True) + eps)
        """,
)
def division_by_zero(value: Value, context: Context) -> str | None:
    denominator = value.args[-1] if value.op == "div" else value.args[0]
    if not denominator.zero or (denominator.host and value.args[0].host) or guarded(denominator, context):
        return None
    if is_exp_sum(denominator) or denominator.op in ("where", "boolean_index"):
        return None
    return f"division by a value that can be 0: {denominator.zero}"


@value_rule(
    "ST202",
    "square root of a sum of squares or a variance",
    on=("sqrt", "rsqrt", "pow"),
    why="The derivative of sqrt at 0 is infinite: with all terms 0 the gradient is inf * 0 = NaN, although the forward pass gives 0.",
    safe="safetrain.safe.norm(x) or torch.linalg.vector_norm(x) (gradient 0 at 0), safetrain.safe.std(x), or an eps inside: sqrt(s + eps).",
    bad="""
        def distance(a, b):
            return ((a - b) ** 2).sum(-1).sqrt()
        """,
    good="""
        import torch

        def distance(a, b):
            return torch.linalg.vector_norm(a - b, dim=-1)
        """,
)
def root_of_square_sum(value: Value, context: Context) -> str | None:
    if value.op == "pow" and value.args[1].constant not in (0.5, -0.5):
        return None
    source = value.args[0]
    if source.low > 0 or guarded(source, context) or not needs_gradient(source, context):
        return None
    if not is_square_sum(source) or (value.op == "pow" and source.op == "add"):
        return None  # (a**2 + b**2) ** 0.5 is more often a formula for plain numbers
    what = "a variance" if source.op == "var" else "a sum of squares"
    return f"square root of {what}, whose gradient is infinite at 0"


@value_rule(
    "ST203",
    "fractional or negative power of a value that can be 0",
    on=("pow", "sqrt", "rsqrt"),
    why="With an exponent below 1 the derivative at 0 is infinite; with a negative one the value is, too.",
    safe="safetrain.safe.pow(x, p) or safetrain.safe.sqrt(x), or x.clamp(min=eps) ** p.",
    bad="""
        import torch

        def compress(spectrum):
            return torch.relu(spectrum) ** 0.3
        """,
    good="""
        import torch

        def compress(spectrum):
            return torch.relu(spectrum).clamp(min=1e-6) ** 0.3
        """,
)
def singular_power(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if is_root_of_difference(value) and not guarded(source, context) and needs_gradient(source, context):
        return "root of the absolute value of a difference, whose gradient is infinite where both are equal"
    if (
        not source.zero
        or guarded(source, context)
        or singular_operand(value) is None
        or root_of_square_sum(value, context)
    ):
        return None
    if source.op in ("sum", "mean") and source.low < 0:
        return None
    exponent = value.args[1].constant if value.op == "pow" else {"sqrt": 0.5, "rsqrt": -0.5}[value.op]
    if exponent is None or (exponent > 0 and not needs_gradient(source, context)):
        return None
    if is_square_sum(source) and exponent > 0:
        return None
    return f"power {exponent:g} of a value that can be 0: {source.zero}"


def is_root_of_difference(value: Value) -> bool:
    exponent = value.args[1].constant if value.op == "pow" and len(value.args) > 1 else 0.5
    source = value.args[0]
    is_root = value.op != "rsqrt" and exponent is not None and 0 < exponent < 1
    return is_root and source.op == "abs" and bool(source.args) and source.args[0].op == "sub" and source.low <= 0


@value_rule(
    "ST204",
    "mean of a selection that can be empty",
    on=("mean", "std", "var"),
    why="The mean of no elements is NaN: one batch in which the mask selects nothing ends the run.",
    safe="safetrain.safe.masked_mean(x, mask), or (x * mask).sum() / mask.sum().clamp(min=1).",
    bad="""
        def foreground_loss(loss, mask):
            return loss[mask > 0].mean()
        """,
    good="""
        def foreground_loss(loss, mask):
            return (loss * (mask > 0)).sum() / (mask > 0).sum().clamp(min=1)
        """,
)
def mean_of_selection(value: Value, context: Context) -> str | None:
    source = value.args[0]
    dim = value.arg(1, "dim")
    if dim is not None and dim.constant != 0:
        return None  # over the features of the selected rows: without rows there is nothing to divide
    if source.op != "boolean_index" or source.names & context.tested or context.no_grad or not source.grad:
        return None
    return f"{value.op} of the elements a mask selects, which can be none"


@value_rule(
    "ST205",
    "hand-written sigmoid",
    on=("div", "reciprocal"),
    why="For large negative x, exp(-x) is inf; the value is still 0, but the gradient is inf * 0 = NaN.",
    safe="torch.sigmoid(x).",
    bad="""
        import torch

        def gate(x):
            return 1 / (1 + torch.exp(-x))
        """,
    good="""
        import torch

        def gate(x):
            return torch.sigmoid(x)
        """,
)
def hand_written_sigmoid(value: Value, context: Context) -> str | None:
    denominator = value.args[-1] if value.op == "div" else value.args[0]
    if denominator.op == "add" and any(arg.constant == 1 for arg in denominator.args):
        if any(is_bare_exp(arg) and needs_gradient(arg, context) for arg in denominator.args):
            return "hand-written sigmoid, 1 / (1 + exp(…))"
    return None
