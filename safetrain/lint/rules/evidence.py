"""Predicates that several rules share."""

from __future__ import annotations

from ..context import Context
from ..operations import is_shifted_by_max
from ..value import Value


def guarded(value: Value, context: Context) -> bool:
    """Whether its zeros are handled: replaced, or checked by a condition before."""
    return value.sanitised or bool(value.names & context.tested)


def needs_gradient(value: Value, context: Context) -> bool:
    return value.grad and not context.no_grad


def is_exp_sum(value: Value) -> bool:
    """sum(exp(x)) without the maximum subtracted."""
    return value.op == "sum" and bool(value.args) and is_bare_exp(value.args[0])


def is_bare_exp(value: Value) -> bool:
    return value.op == "exp" and bool(value.args) and not is_shifted_by_max(value.args[0])


def in_half(value: Value, context: Context, types: tuple[str, ...] = ("half",)) -> bool:
    """Whether it is known to be in half precision: by its own type, or because it is computed under autocast."""
    return value.dtype in types or (context.autocast in types and value.dtype != "float" and not value.host)


def is_square_sum(value: Value) -> bool:
    """A sum or mean of squares, of absolute values to a power, a variance: 0 exactly where the derivative of its root is infinite."""
    if value.op == "var":
        return True
    if value.op in ("sum", "mean", "nanmean", "cumsum") and value.args:
        return value.args[0].op == "square"
    if value.op == "add" and len(value.args) == 2:
        return all(arg.op == "square" or is_square_sum(arg) for arg in value.args)
    return value.op == "mse_loss"
