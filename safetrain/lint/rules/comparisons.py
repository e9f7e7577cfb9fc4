"""ST6xx: comparisons that are always False."""

from __future__ import annotations

from ..context import Context
from ..rule import value_rule
from ..value import Value


@value_rule(
    "ST601",
    "comparison with NaN",
    on=("eq", "ne"),
    why="NaN is equal to nothing, itself included: the comparison is always False (!= always True), and the NaN is never detected.",
    safe="torch.isnan(x).any(), or torch.isfinite(x).all() to catch inf as well.",
    bad="""
        def is_bad(loss):
            return loss == float("nan")
        """,
    good="""
        import torch

        def is_bad(loss):
            return not torch.isfinite(loss).all()
        """,
)
def comparison_with_nan(value: Value, context: Context) -> str | None:
    if any(arg.ref == "nan" and arg.op == "const" for arg in value.args):
        return f"comparison with NaN is always {'False' if value.op == 'eq' else 'True'}"
    return None
