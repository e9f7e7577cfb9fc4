"""Argument checks and conversions of the safe operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError


def as_real(x: Tensor, function: str) -> Tensor:
    """`x` as a real floating-point tensor; integers and booleans take the default dtype, as in torch's own functions."""
    if not isinstance(x, Tensor):
        raise UsageError(
            f"safe.{function} takes a tensor, but got {type(x).__name__}. To fix: wrap it in torch.as_tensor(...)."
        )
    if x.is_complex():
        raise UsageError(f"safe.{function} takes real numbers, but got {x.dtype}. To fix: use torch.{function} on it.")
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def as_mask(mask: Tensor, function: str) -> Tensor:
    """`mask` as booleans, True where an element is used. Floats are refused: they may be weights or an additive mask."""
    if mask.is_floating_point() or mask.is_complex():
        raise UsageError(
            f"safe.{function} takes a boolean mask, True where an element takes part, but got {mask.dtype}. "
            "To fix: pass `mask.bool()` if it holds ones and zeros, or `mask == 0` if it is added to the scores."
        )
    return mask.bool()


def result_dtype(x: Tensor | float, y: Tensor | float) -> torch.dtype:
    """The dtype in which torch combines two operands; `torch.result_type` would break the graph under compile."""
    dtype = (_without_numbers(x) + _without_numbers(y)).dtype  # type: ignore[union-attr]
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _without_numbers(x: Tensor | float) -> Tensor | float:
    return x.new_zeros((0,) if x.dim() else ()) if isinstance(x, Tensor) else x


def floor_of(dtype: torch.dtype, eps: float | None = None) -> float:
    """`eps`, but at least the smallest number of the dtype with a reciprocal: 1e-8 is 0 in float16.

    That is the smallest normal number, because smaller ones overflow or are flushed to zero on some devices. In float16
    subnormal numbers are common probabilities and never flushed; the smallest with a finite reciprocal is one of them.
    """
    tiny = 2**-16 + 2**-24 if dtype is torch.float16 else torch.finfo(dtype).tiny
    return tiny if eps is None else max(eps, tiny)


def broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x, y = torch.broadcast_tensors(x, y)  # type: ignore[no-untyped-call]
    return x, y


def is_finite_and(condition: Tensor, x: Tensor) -> Tensor:
    """Where `condition` holds and `x` is finite: the elements to replace. NaN and Inf in the input must stay visible."""
    return condition & torch.isfinite(x)
