"""Logarithms that are known without computing the number itself: of a softmax, a sigmoid, an exponential, and of
expressions of these.

`log(softmax(x))` is -inf where the probability has rounded to 0, and a floor below it cuts off the gradient exactly where the model is
most wrong. `log_softmax(x)` is the same function and has the right gradient there. While a `SafeVariant` is active, results carry a way to
compute their own logarithm; operations that would go wrong use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ATTRIBUTE = "_safetrain_logarithm"


@dataclass(frozen=True)
class Logarithm:
    """Of a positive tensor."""

    value: Callable[[], Tensor]
    form: str
    """What computes it, as a person would write it."""
    logit: Callable[[], Tensor] | None = None
    """Of a sigmoid, or of its complement."""
    is_exp: bool = False
    at_place: bool = False
    """Something that it is made of was computed at the line in question."""


def of(item: Any) -> Logarithm | None:
    return getattr(item, _ATTRIBUTE, None) if isinstance(item, Tensor) else None


def forget(item: Any) -> None:
    if isinstance(item, Tensor) and hasattr(item, _ATTRIBUTE):
        delattr(item, _ATTRIBUTE)


def remember(result: Any, logarithm: Logarithm | None) -> Any:
    if logarithm is not None and isinstance(result, Tensor):
        setattr(result, _ATTRIBUTE, logarithm)
    return result


# ---- what is known of the result of a function -----------------------------------------------------------------

SAME_SHAPES = (
    *("getitem", "gather", "take_along_dim", "index_select", "select", "narrow", "view", "reshape", "flatten", "squeeze", "unsqueeze"),
    *("transpose", "permute", "expand", "expand_as", "contiguous", "float", "double", "clone", "t", "view_as", "diagonal"),
)  # fmt: skip
"""They choose or arrange values, and do the same to their logarithms."""


def of_result(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at_place: bool) -> Logarithm | None:
    """The logarithm of what this call returns, if it can be computed in another way."""
    made = _made(name, func, args, kwargs)
    if made is None:
        return None
    parts = [found for found in map(of, args) if found is not None]
    value, form, logit, is_exp = made
    return Logarithm(value, form, logit, is_exp, at_place or any(part.at_place for part in parts))


_Made = tuple[Callable[[], Tensor], str, Callable[[], Tensor] | None, bool]


def _made(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made | None:
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    known = of(x)
    if name == "softmax":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return None if dim is None else (lambda: F.log_softmax(x, dim), "log_softmax", None, False)
    if name == "sigmoid":
        return lambda: F.logsigmoid(x), "logsigmoid", lambda: x, False
    if name == "exp":
        return lambda: x, "the exponent itself", None, True
    if name in ("add", "sub", "mul", "div") and len(args) > 1:
        return _of_two(name, getattr(func, "__name__", ""), x, args[1])
    if known is None:
        return None
    if name == "reciprocal":
        return lambda: -known.value(), known.form, _negated(known), False
    if name in ("sum", "mean") and not ({"dtype", "out"} & kwargs.keys()):
        return _of_sum(name, x, known, args[1:], kwargs)
    if name in SAME_SHAPES:
        logit = known.logit
        return (
            lambda: func(known.value(), *args[1:], **kwargs),
            known.form,
            None if logit is None else lambda: func(logit(), *args[1:], **kwargs),
            known.is_exp,
        )
    return None


def _of_two(name: str, called: str, x: Tensor, y: Any) -> _Made | None:
    one, other = of(x), of(y)
    first_operand: Any = x
    is_swapped = called.startswith("__r") or called == "rsub"
    if is_swapped:
        one, other, first_operand, y = other, one, y, x
    if name == "sub":
        known = other
        if (
            known is not None
            and known.logit is not None
            and not isinstance(first_operand, Tensor)
            and first_operand == 1
        ):
            logit = known.logit
            return lambda: F.logsigmoid(-logit()), "logsigmoid", lambda: -logit(), False
        return None
    first, second = _logarithm(one, first_operand), _logarithm(other, y)
    if first is None or second is None or (one is None and other is None):
        return None
    form = (one or other).form  # type: ignore[union-attr]
    if name == "mul":
        return lambda: first() + second(), form, None, False
    if name == "div":
        is_ratio_of_exps = one is not None and other is not None
        return (
            lambda: first() - second(),
            "log_softmax" if is_ratio_of_exps else form,
            _of_inverse(first_operand, other),
            False,
        )
    known, constant = (one, y) if one is not None else (other, x)
    if known is not None and known.is_exp and not isinstance(constant, Tensor) and constant == 1:
        return lambda: F.softplus(known.value()), "softplus", known.value, False
    return lambda: _logaddexp(first(), second()), "logsumexp", None, False


def _logaddexp(one: Tensor | float, other: Tensor | float) -> Tensor:
    if not isinstance(one, Tensor):
        one, other = other, one
    assert isinstance(one, Tensor)
    return torch.logaddexp(one, other if isinstance(other, Tensor) else torch.full_like(one, other))


def _logarithm(known: Logarithm | None, item: Any) -> Callable[[], Any] | None:
    """Of one operand; of a plain number it is a number."""
    if known is not None:
        return known.value
    if isinstance(item, (int, float)) and item > 0:
        return lambda: math.log(item)
    return None


def _of_inverse(x: Any, other: Logarithm | None) -> Callable[[], Tensor] | None:
    """1 / (1 + exp(x)) is the sigmoid of -x."""
    if other is None or other.form != "softplus" or other.logit is None or isinstance(x, Tensor) or x != 1:
        return None
    logit = other.logit
    return lambda: -logit()


def _negated(known: Logarithm) -> Callable[[], Tensor] | None:
    return _of_inverse(1, known)


def _of_sum(name: str, x: Tensor, known: Logarithm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made:
    dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    dims = tuple(range(x.dim())) if dim is None else dim

    def value() -> Tensor:
        total = torch.logsumexp(known.value(), dims, keepdim)
        return total - math.log(x.numel() / total.numel()) if name == "mean" else total

    return value, "logsumexp", None, False


# ---- functions that would go wrong -----------------------------------------------------------------------------


def fused(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, str] | None:
    """What the call returns, computed from the logarithms, and the form that was used. None if they are not known."""
    x = args[0] if args else kwargs.get("input")
    known = of(x)
    if name in _SCALES and known is not None:
        return known.value() / _SCALES[name], known.form
    if name == "log1p" and known is not None:
        return F.softplus(known.value()), "softplus"
    if name == "binary_cross_entropy" and known is not None and known.logit is not None:
        return F.binary_cross_entropy_with_logits(
            known.logit(), *args[1:], **kwargs
        ), "binary_cross_entropy_with_logits"
    if name == "xlogy" and x is not None and len(args) > 1 and (second := of(args[1])) is not None:
        product = x * second.value()
        return torch.where(torch.as_tensor(x) == 0, torch.zeros_like(product), product), second.form
    if name in ("div", "reciprocal") and (made := _made(name, func, args, kwargs)) is not None:
        value, form, logit, _ = made
        if logit is not None:
            return torch.sigmoid(logit()), "sigmoid"
        return value().exp(), "softmax" if form == "log_softmax" else form
    return None


_SCALES = {"log": 1.0, "log2": math.log(2.0), "log10": math.log(10.0)}
FOLLOWED = frozenset(
    [
        *(*SAME_SHAPES, *_SCALES, "softmax", "sigmoid", "exp", "add", "sub", "mul", "div", "reciprocal", "sum", "mean"),
        *("log1p", "xlogy", "binary_cross_entropy"),
    ]
)
"""Functions whose place in the source matters."""
