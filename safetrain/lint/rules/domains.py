"""ST25x: functions with a bounded domain."""

from __future__ import annotations

from ..context import Context
from ..rule import value_rule
from ..value import Value
from .evidence import needs_gradient


@value_rule(
    "ST251",
    "acos, asin or atanh at the edge of its domain",
    on=("acos", "asin", "atanh"),
    why="A cosine of 1.0000001 by rounding gives NaN, and at exactly ±1 the derivative is infinite; clamp(-1, 1) fixes only the first.",
    safe="safetrain.safe.acos / asin / atanh, or x.clamp(-1 + 1e-6, 1 - 1e-6) before; atan2(sin, cos) for an angle.",
    bad="""
        import torch
        import torch.nn.functional as F

        def angle(a, b):
            return torch.acos(F.cosine_similarity(a, b))
        """,
    good="""
        import torch
        import torch.nn.functional as F

        def angle(a, b):
            return torch.acos(F.cosine_similarity(a, b).clamp(-1 + 1e-6, 1 - 1e-6))
        """,
)
def edge_of_domain(value: Value, context: Context) -> str | None:
    source = value.args[0]
    if source.low > -1 and source.high < 1:
        return None
    if source.sanitised or source.op in ("rand", "eps"):  # limits that are not literals are assumed to be correct
        return None
    clamped = source.op in ("clamp", "tanh") and source.low >= -1 and source.high <= 1
    if clamped and value.op in ("acos", "asin") and not needs_gradient(source, context):
        return None
    if clamped and source.op == "clamp":
        return f"{value.op} of a value clamped to exactly ±1, where {'it' if value.op == 'atanh' else 'its gradient'} is infinite"
    return f"{value.op} of a value that is not kept inside (-1, 1)"
