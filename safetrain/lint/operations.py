"""How torch's operations change bounds, dtypes and the possibility of 0. One function per kind of operation."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from .value import Value
from .vocabulary import CLEARS_UNSAFE, COMPARISONS, FACTORIES, REDUCTIONS

Facts = dict[str, Any]
Transfer = Callable[[Value], Facts]


def apply(value: Value) -> Value:
    """The value of an operation, with what is known from its arguments."""
    operands = [*value.args, *value.kwargs.values()]
    tensors = [arg for arg in value.args if not arg.host]
    shared: Facts = {
        "names": frozenset[str]().union(*(arg.names for arg in operands)) | value.names,
        "labels": frozenset(),
        "surface": frozenset[str]().union(*(arg.labels or arg.surface for arg in operands)),
        "grad": any(arg.grad for arg in operands) if operands else value.grad,
        "dtype": _promote(tensors),
        "host": bool(value.args) and not tensors and value.op not in FACTORIES,
        "causal": any(arg.causal for arg in value.args),
        "masked": value.op in ("add", "sub", "div", "mul") and any(arg.masked for arg in value.args),
        "unsafe": _inherited_unsafe(value),
    }
    transfer = TRANSFERS.get(value.op)
    facts = transfer(value) if transfer else {}
    done = replace(value, **{**shared, **facts}).settled()
    return replace(done, unsafe=(*done.unsafe, done)[-8:]) if singular_operand(done) is not None else done


def _promote(args: list[Value]) -> str:
    types = [arg.dtype for arg in args]
    for dtype in ("float", "half", "bf16"):
        if dtype in types:
            return dtype
    return types[0] if types and len(set(types)) == 1 and types[0] == "int" else ""


def _inherited_unsafe(value: Value) -> tuple[Value, ...]:
    if value.op in CLEARS_UNSAFE or value.op in REDUCTIONS or value.op == "call":
        return ()
    unsafe: list[Value] = []
    for arg in value.args:
        unsafe += [one for one in arg.unsafe if one not in unsafe]
    return tuple(unsafe[-8:])


def singular_operand(value: Value) -> Value | None:
    """The argument for which this operation, or its derivative, is infinite; None if the bounds rule that out."""
    if value.op == "div" and len(value.args) == 2:
        operand, bad = value.args[1], value.args[1].low <= 0 <= value.args[1].high
        bad = bad and not operand.host
    elif value.op in ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal") and value.args:
        operand, bad = value.args[0], value.args[0].low <= 0
    elif value.op == "exp" and value.args:
        operand, bad = value.args[0], value.args[0].high > 88 and not is_shifted_by_max(value.args[0])
    elif value.op in ("acos", "asin", "atanh") and value.args:
        operand, bad = value.args[0], value.args[0].low <= -1 or value.args[0].high >= 1
    elif value.op == "pow" and len(value.args) == 2 and not value.args[0].host:
        exponent = value.args[1].constant
        operand = value.args[0]
        is_singular_at_0 = exponent is not None and (exponent < 0 or 0 < exponent < 1)
        bad = is_singular_at_0 and operand.low <= 0
    else:
        return None
    return operand if bad and not operand.sanitised and not operand.host else None


# --- arithmetic --------------------------------------------------------------------------------------------------


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _add(value: Value) -> Facts:
    a, b = value.args
    low, high = a.low + b.low, a.high + b.high
    both = ""
    if a.zero and b.zero:
        both = a.zero
    elif a.op in ("abs", "square", "norm") and b.op in ("abs", "square", "norm"):
        both = "a sum of absolute values or squares is 0 when all of them are"
    return {"low": _known(low, -inf), "high": _known(high, inf), "zero": both, "sanitised": a.sanitised or b.sanitised}


def _known(bound: float, unknown: float) -> float:
    return unknown if math.isnan(bound) else bound


def _sub(value: Value) -> Facts:
    a, b = value.args
    facts = {"low": _known(a.low - b.high, -inf), "high": _known(a.high - b.low, inf), "zero": ""}
    if a.op in ("max", "amax") and b.op in ("min", "amin") and a.names & b.names:
        facts |= {"low": 0.0, "zero": "the range of equal values is 0"}
    elif a.constant == 1 and b.op in ("sigmoid", "softmax", "square") and b.high == 1:
        facts["zero"] = f"1 - {b.op} is 0 once the {b.op} rounds to 1"
    elif a.constant == 1 and b.high == 1 and b.low >= 0:
        facts["zero"] = "it is 0 where the subtracted value reaches 1"
    return facts


def _mul(value: Value) -> Facts:
    a, b = value.args
    if a.names and a.names == b.names and a.op == b.op and isinstance(a.node, ast.expr) and b.node is not None:
        if ast.dump(a.node) == ast.dump(b.node):
            return {"op": "square", "low": 0.0, "zero": a.zero, "sanitised": a.sanitised}
    corners = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    zero, sanitised = a.zero or b.zero, a.sanitised or b.sanitised
    return {"low": min(corners), "high": max(corners), "zero": zero, "sanitised": sanitised}


def _div(value: Value) -> Facts:
    a, b = value.args
    facts: Facts = {"zero": a.zero, "sanitised": a.sanitised, "host": a.host and b.host}
    if b.low >= 0:
        facts |= {"low": 0.0 if a.low >= 0 else -inf, "high": 0.0 if a.high <= 0 else inf}
        if b.constant:
            low, high = sorted((a.low / b.constant, a.high / b.constant))
            facts |= {"low": low, "high": high}
    elif a.low >= 0 and b.low >= 0:
        facts["low"] = 0.0
    return facts


def _neg(value: Value) -> Facts:
    a = value.args[0]
    return {"low": -a.high, "high": -a.low, "zero": a.zero, "masked": False}


def _pow(value: Value) -> Facts:
    base, exponent = value.args[0], value.args[1].constant
    if exponent is None or exponent <= 0:
        return {"low": 0.0 if base.low >= 0 else -inf}
    if exponent % 2 == 0:
        high = max(abs(base.low), abs(base.high)) ** exponent if max(abs(base.low), abs(base.high)) < 1e30 else inf
        low = base.low**exponent if 0 < base.low < 1e30 else 0.0
        return {"op": "square", "low": low, "high": high, "zero": base.zero, "sanitised": base.sanitised}
    return {"low": 0.0 if base.low >= 0 else -inf, "zero": base.zero, "sanitised": base.sanitised}


def _square(value: Value) -> Facts:
    base = value.args[0]
    high = base.high**2 if max(abs(base.low), abs(base.high)) == base.high < 1e30 else inf
    low = base.low**2 if 0 < base.low < 1e30 else 0.0
    return {"low": low, "high": high, "zero": base.zero, "sanitised": base.sanitised}


def _abs(value: Value) -> Facts:
    a = value.args[0]
    return {"low": max(a.low, 0.0), "high": max(abs(a.low), abs(a.high)), "zero": a.zero, "sanitised": a.sanitised}


# --- functions of one argument -------------------------------------------------------------------------------------


def _exp(value: Value) -> Facts:
    a = value.args[0]
    low = math.exp(min(a.low, 300.0)) if a.low > -700 else 0.0
    return {"low": low, "high": math.exp(a.high) if a.high < 300 else inf}


def _sqrt(value: Value) -> Facts:
    a = value.args[0]
    low, high = math.sqrt(max(a.low, 0.0)), math.sqrt(a.high) if a.high >= 0 else inf
    return {"low": low, "high": high, "zero": a.zero, "sanitised": a.sanitised}


def _log(value: Value) -> Facts:
    a = value.args[0]
    return {"low": math.log(a.low) if 0 < a.low < inf else -inf, "high": math.log(a.high) if 0 < a.high < inf else inf}


def _bounded(low: float, high: float, zero: str = "") -> Transfer:
    return lambda value: {"low": low, "high": high, "zero": zero}


def _relu(value: Value) -> Facts:
    return {"low": 0.0, "zero": "relu gives exactly 0"}


# --- guards ------------------------------------------------------------------------------------------------------


def _clamp(value: Value) -> Facts:
    source = value.args[0]
    lowest = value.arg(1, "min", "min_val") if value.op != "clamp_max" else None
    highest = value.arg(2, "max", "max_val") if value.op == "clamp" else None
    if value.op == "clamp_max":
        highest = value.arg(1, "max")
    low = max(source.low, lowest.low) if lowest is not None else source.low
    high = min(source.high, highest.high) if highest is not None else source.high
    unknown = any(limit is not None and limit.constant is None for limit in (lowest, highest))
    return {"low": low, "high": high, "zero": "" if unknown else source.zero, "sanitised": unknown, "host": source.host}


def _maximum(value: Value) -> Facts:
    if len(value.args) < 2 or value.args[1].op == "dim":
        return _extreme(value)
    low = max(arg.low for arg in value.args)
    # The maximum with an unknown number is most likely a guard.
    return {"low": low, "high": max(arg.high for arg in value.args), "zero": "", "sanitised": True}


def _extreme(value: Value) -> Facts:
    if not value.args:
        return {}
    source = value.args[0]
    zero = source.zero if source.low >= 0 else ""
    if value.op in ("max", "amax") and source.op in ("abs", "square"):
        zero = "the largest absolute value of an all-zero tensor is 0"
    return {"low": source.low, "high": source.high, "zero": zero}


def _replaced(value: Value) -> Facts:
    """where, masked_fill, nan_to_num: some elements were replaced, so it is not known to be 0 any more."""
    source = value.args[1] if value.op == "where" and len(value.args) > 1 else value.args[0]
    fill = value.arg(2, "value", "other") if value.op != "where" else None
    mask = value.arg(0 if value.op == "where" else 1, "mask", "condition")
    fills = [fill] if fill is not None else list(value.args[1:3]) if value.op == "where" else []
    minus_inf = any(one.constant is None and one.low == one.high == -inf for one in fills)
    return {
        "sanitised": True, "zero": "", "dtype": source.dtype if source.dtype in ("half", "float", "bf16") else "",
        "masked": source.masked or (minus_inf and mask is not None and not mask.causal),
        "causal": source.causal,
    }  # fmt: skip


# --- reductions --------------------------------------------------------------------------------------------------


def _sum(value: Value) -> Facts:
    if not value.args:
        return {}
    source = value.args[0]
    low = source.low if source.low > 0 else 0.0 if source.low == 0 or source.is_mask else -inf
    if source.op == "exp" and is_shifted_by_max(source.args[0]):
        return {"low": 1.0, "high": inf}
    if source.op == "softmax":
        return {"low": 0.0, "high": inf}
    if source.is_mask or source.op == "one_hot":
        reason = "the count is 0 when nothing is selected"
    else:
        reason = "a sum is 0 when its terms are 0 or cancel"
    return {"low": low, "high": inf if source.high > 0 else 0.0, "zero": "" if source.low > 0 else reason}


def _mean(value: Value) -> Facts:
    if not value.args:
        return {}
    source = value.args[0]
    return {"low": source.low, "high": source.high, "zero": "a mean is 0 when its terms are 0 or cancel"}


def is_shifted_by_max(value: Value) -> bool:
    """Whether it is x minus the maximum of x (or something that could be the maximum), possibly scaled."""
    if value.op in ("mul", "div"):
        return value.high <= 88 or any(
            is_shifted_by_max(arg) for arg in value.args if not arg.host and arg.op in ("sub", "add", "mul")
        )
    if value.op in ("sub", "add") and len(value.args) > 1:
        shift = value.args[1] if value.op == "sub" else value.args[0]
        if shift.op in ("max", "amax", "logsumexp", "maximum", "cummax"):
            return True
        return any("max" in name.lower() or "lse" in name.lower() or "logz" in name.lower() for name in shift.names)
    return value.high <= 88


def _norm(value: Value) -> Facts:
    never_zero = bool(value.args) and value.args[0].op in ("randn", "softmax")
    return {"low": 0.0, "zero": "" if never_zero else "the norm of an all-zero vector is 0"}


def _deviation(value: Value) -> Facts:
    what = "standard deviation" if value.op == "std" else "variance"
    return {"low": 0.0, "zero": f"the {what} of equal values is 0"}


def _cast(dtype: str) -> Transfer:
    return lambda value: {
        "dtype": dtype,
        "low": value.args[0].low if value.args else -inf,
        "grad": dtype not in ("int", "bool"),
    }


TRANSFERS: dict[str, Transfer] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "neg": _neg, "pow": _pow, "square": _square, "abs": _abs,
    "exp": _exp, "sqrt": _sqrt, "log": _log, "log2": _log, "log10": _log,
    "sigmoid": _bounded(0.0, 1.0), "softmax": _bounded(0.0, 1.0), "tanh": _bounded(-1.0, 1.0),
    "cosine_similarity": _bounded(-1.0, 1.0), "sin": _bounded(-1.0, 1.0), "cos": _bounded(-1.0, 1.0),
    "softplus": _bounded(0.0, inf), "elu": _bounded(-1.0, inf), "relu": _relu,
    "log_softmax": _bounded(-inf, 0.0), "logsigmoid": _bounded(-inf, 0.0),
    "rand": lambda value: {"low": 0.0, "high": 1.0, "zero": "torch.rand can return exactly 0", "grad": False},
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": _clamp, "maximum": _maximum, "minimum": _extreme,
    "max": _maximum, "amax": _extreme, "min": _extreme, "amin": _extreme,
    "where": _replaced, "masked_fill": _replaced, "nan_to_num": _replaced,
    "sum": _sum, "nansum": _sum, "mean": _mean, "nanmean": _mean,
    "norm": _norm, "std": _deviation, "var": _deviation,
    "count_nonzero": lambda value: {"low": 0.0, "zero": "the count is 0 when nothing is selected", "grad": False},
    "bincount": lambda value: {"low": 0.0, "zero": "a class that does not occur has the count 0", "grad": False},
    "scatter_add": lambda value: {"zero": "a group that nothing falls into stays 0" if value.args[0].op == "zeros" else ""},
    "index_add": lambda value: {"zero": "a group that nothing falls into stays 0" if value.args[0].op == "zeros" else ""},
    "tensor": lambda value: {"low": value.args[0].low, "high": value.args[0].high, "grad": False} if value.args[0].op == "const" else {},
    "one_hot": lambda value: {"low": 0.0, "high": 1.0, "grad": False},
    "triu": lambda value: {"causal": True}, "tril": lambda value: {"causal": True},
    "int": _cast("int"), "long": _cast("int"), "bool": _cast("bool"),
    "item": lambda value: {"host": True, "grad": False, "zero": value.args[0].zero}, "tolist": lambda value: {"host": True, "grad": False},
    "numpy": lambda value: {"host": True, "grad": False},
    "numel": lambda value: {"low": 0.0, "host": True, "grad": False},
    "argmax": _cast("int"), "argmin": _cast("int"), "randint": _cast("int"), "floor": lambda value: {"grad": False},
    "round": lambda value: {"grad": False},
    **{comparison: (lambda value: {"dtype": "bool", "grad": False, "low": 0.0, "high": 1.0}) for comparison in COMPARISONS},
}  # fmt: skip
