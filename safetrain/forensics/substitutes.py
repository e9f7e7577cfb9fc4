"""Replaces ops at one line of the user's code by safe variants while a step is replayed.

They replace the call above autograd, so that the gradient is that of the safe variant too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import logspace
from .api_names import api_name
from .backward_functions import SUFFIX, FiniteBackward
from .frames import Place, is_user

Substitute = Callable[..., Any]
SUBSTITUTES: dict[str, Substitute] = {}
"""By the name of the function called: takes the function and its arguments, gives the safe result."""


def substitute(*names: str) -> Callable[[Substitute], Substitute]:
    def register(function: Substitute) -> Substitute:
        SUBSTITUTES.update(dict.fromkeys(names, function))
        return function

    return register


def _eps(tensor: Tensor) -> float:
    return 1e-3 if tensor.dtype in (torch.float16, torch.bfloat16) else 1e-6


def _floored(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(_eps(tensor))


def _floored_with_gradient(tensor: Tensor) -> Tensor:
    """The derivative goes on below the floor: a value that is too small is pushed up, not given up."""
    eps = _eps(tensor)
    return torch.where(tensor < eps, eps + (tensor - tensor.detach()).nan_to_num(), tensor)


def _away_from_zero(tensor: Tensor) -> Tensor:
    eps = _eps(tensor)
    return torch.where(tensor.abs() < eps, torch.full_like(tensor, eps), tensor)


def _without_minus_inf(scores: Tensor) -> Tensor:
    """-inf becomes a large negative number: masked positions still get nothing, and a fully masked row is uniform."""
    lowest = -1e4 if scores.dtype == torch.float16 else -1e9
    return torch.where(scores == -math.inf, torch.full_like(scores, lowest), scores)


def _with_separated_spectrum(x: Tensor) -> Tensor:
    """A graded ridge: small, and different on each entry of the diagonal, so that no two eigenvalues stay equal."""
    n = min(x.shape[-2:])
    scale = x.detach().abs().max().clamp_min(1.0) * 1e-2
    ridge = torch.zeros_like(x)
    ridge.diagonal(dim1=-2, dim2=-1).copy_(scale * torch.linspace(1, 5, n, dtype=x.dtype, device=x.device))
    return x + ridge


_FIRST_ARGUMENT: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("log log2 log10", _floored_with_gradient),
    ("sqrt rsqrt poisson_nll_loss lgamma digamma", _floored),
    ("log1p", lambda x: x.clamp_min(-1 + _eps(x))),
    ("reciprocal", _away_from_zero),
    ("exp exp2 expm1 sinh cosh", lambda x: x.clamp(max=10.0 if x.dtype == torch.float16 else 30.0)),
    ("acos asin arccos arcsin atanh arctanh erfinv", lambda x: x.clamp(-1 + _eps(x), 1 - _eps(x))),
    ("acosh arccosh", lambda x: x.clamp_min(1 + _eps(x))),
    ("logit binary_cross_entropy", lambda x: torch.nan_to_num(x).clamp(_eps(x), 1 - _eps(x))),
    ("softmax log_softmax logsumexp softmin", _without_minus_inf),
    ("norm vector_norm cdist dist hypot normalize pairwise_distance cosine_similarity", lambda x: x + _eps(x)),
    ("svd linalg_svd eigh linalg_eigh cholesky linalg_cholesky", _with_separated_spectrum),
    ("inv linalg_inv solve linalg_solve", _with_separated_spectrum),
]
"""Functions that are safe once their first argument is changed."""


def _of_changed(change: Callable[[Tensor], Tensor]) -> Substitute:
    return lambda func, x, *args, **kwargs: func(change(x), *args, **kwargs)


for _names, _change in _FIRST_ARGUMENT:
    substitute(*_names.split())(_of_changed(_change))


@substitute("xlogy")
def positive_second_argument(func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    return func(x, _floored(y) if isinstance(y, Tensor) else max(y, 1e-6), *args, **kwargs)


@substitute("div", "floor_divide", "fmod", "remainder")
def nonzero_divisor(func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    if func.__name__ in ("__rtruediv__", "__rdiv__"):  # called as (divisor, dividend)
        return func(_away_from_zero(x), y, *args, **kwargs)
    if not isinstance(y, Tensor):
        return func(x, y if y else 1e-6, *args, **kwargs)
    return func(x, _away_from_zero(y if y.is_floating_point() else y.float()), *args, **kwargs)


@substitute("pow", "float_power")
def positive_base(func: Any, x: Any, exponent: Any, *args: Any, **kwargs: Any) -> Any:
    if func.__name__ == "__rpow__" or not isinstance(x, Tensor):
        return func(x.clamp(max=30.0) if isinstance(x, Tensor) else x, exponent, *args, **kwargs)
    safe = torch.nan_to_num(x)
    whole = isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent > 0
    return func(safe.clamp(-1e9, 1e9) if whole else _floored(safe), exponent, *args, **kwargs)


@substitute("std", "var")
def biased_estimate(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs = {key: value for key, value in kwargs.items() if key not in ("unbiased", "correction")}
    # The derivative of std at 0 is 0 in torch; only the division by n - 1 is undefined.
    return func(x, *args, **kwargs, correction=0)


@substitute("mean", "nanmean", "median")
def mean_of_something(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if x.numel() == 0:
        return x.sum(*args, **kwargs)
    return torch.nan_to_num(func(torch.nan_to_num(x) if func.__name__ == "nanmean" else x, *args, **kwargs))


@substitute("cross_entropy", "nll_loss")
def counted_targets(func: Any, scores: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    scores = _without_minus_inf(scores)
    if not target.is_floating_point() and kwargs.get("reduction", "mean") == "mean":
        total = func(scores, target, *args, **{**kwargs, "reduction": "sum"})
        return total / (target != kwargs.get("ignore_index", -100)).sum().clamp_min(1)
    return func(scores, target, *args, **kwargs)


@substitute("ctc_loss")
def without_infinity(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **{**kwargs, "zero_infinity": True})


@substitute("layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm")
def larger_eps(func: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], float) and not kwargs:
        return func(*args[:-1], max(args[-1], 1e-5))
    return func(*args, **{**kwargs, "eps": 1e-5})


@substitute("gather", "take_along_dim", "index_select", "getitem")
def finite_selection(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    result = func(x, *args, **kwargs)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    return torch.where(torch.isfinite(result), result, torch.zeros_like(result))


@dataclass(frozen=True)
class Patch:
    """Which calls to replace: those of one line, of the given functions or of all that have a safe variant."""

    place: Place
    names: frozenset[str] | None
    is_fused: bool = False
    """Computed from the logarithms of its operands, see `logspace`."""

    def active(self) -> SafeVariant | FiniteBackward:
        """A context manager that puts the safe variants in; `num_hits` counts the calls that used them."""
        if self.names is not None and len(self.names) == 1 and (name := next(iter(self.names))).endswith(SUFFIX):
            return FiniteBackward(name)
        return SafeVariant(self.place, self.names, self.is_fused)


class SafeVariant(TorchFunctionMode):
    """While active, calls of these names from this line use their safe variant. `num_hits` counts them.

    `is_fused`: calls at this line, and those that use what it has computed, are computed from logarithms where these are known.
    """

    def __init__(self, place: Place, names: Set[str] | None = None, is_fused: bool = False) -> None:
        super().__init__()
        self._place = place
        self._names = names
        self._is_fused = is_fused
        self.num_hits = 0
        self.forms: list[str] = []
        """The fused forms that were used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = api_name(func)
        if self._is_fused:
            return self._from_logarithms(name or "", func, args, kwargs)
        safe = SUBSTITUTES.get(name or "")
        if safe is None or (self._names is not None and name not in self._names) or not self._is_here():
            return func(*args, **kwargs)
        self.num_hits += 1
        return safe(func, *args, **kwargs)

    def _from_logarithms(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        called = getattr(func, "__name__", "")
        if called.startswith("__i") or (called.endswith("_") and not called.endswith("__")):  # in place
            logspace.forget(args[0] if args else None)
            return func(*args, **kwargs)
        is_here = name in logspace.FOLLOWED and self._is_here()
        known = [found for found in map(logspace.of, args) if found is not None]
        if known and (is_here or any(found.at_place for found in known)):
            if (found := logspace.fused(name, func, args, kwargs)) is not None:
                result, form = found
                self.num_hits += 1
                if form not in self.forms:
                    self.forms.append(form)
                return logspace.remember(result, logspace.of_result(name, func, args, kwargs, is_here))
        logarithm = logspace.of_result(name, func, args, kwargs, is_here) if name in logspace.FOLLOWED else None
        return logspace.remember(func(*args, **kwargs), logarithm)

    def _is_here(self) -> bool:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if is_user(frame.f_code):
                return frame.f_code.co_filename == self._place.file and frame.f_lineno == self._place.line
            frame = frame.f_back
        return False
