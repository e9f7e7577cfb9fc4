"""One place computes the gradient norm that is logged, judged and clipped by; one place clips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .view import Limits


def collect(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that exist, as dense tensors; a sparse gradient is given by its values, which may be written to."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # duplicate rows would count twice in the norm
            gradients.append(parameter.grad._values())
        else:
            gradients.append(parameter.grad)
    return gradients


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` computes it, bit for bit; stays on the device."""
    return get_total_norm(gradients)


def peak(tensors: Sequence[Tensor]) -> Tensor | None:
    """Largest absolute value; NaN and Inf propagate, and unlike the L2 norm it cannot overflow."""
    filled = [t for t in tensors if t.numel()]
    return get_total_norm(filled, math.inf) if filled else None


def overflow_free_norm(gradients: Sequence[Tensor]) -> float | None:
    """The true norm when float32 overflowed to Inf, or None when a gradient really is non-finite. Reads the host."""
    largest = peak(gradients)
    if largest is None or not math.isfinite(scale := float(largest)):
        return None
    return scale * float(get_total_norm([g / scale for g in gradients]))


@torch.no_grad()
def clip(
    groups: Sequence[Sequence[Tensor]], everything: Sequence[Tensor], limits: Limits, norm: Tensor, host_norm: float | None
) -> None:
    """Bound the gradients of `everything` (parameters) and of each group of it to `limits`, in place.

    `host_norm` is the norm as the host knows it; None when it has not been read, then nothing here reads it either.
    """
    if limits.norm < math.inf and (host_norm is None or host_norm + 1e-6 > limits.norm):
        _scale(everything, limits.norm, norm, host_norm)
    if limits.group_norm < math.inf:
        for group in groups:
            if gradients := collect(group):
                group_norm = global_norm(gradients)
                # A group's norm can only overflow where the global one did; the host knows that already.
                overflowed = host_norm is not None and math.isinf(float(norm)) and math.isinf(float(group_norm))
                _scale(group, limits.group_norm, group_norm, overflow_free_norm(gradients) if overflowed else None)
    if limits.value < math.inf:
        for gradient in collect(everything):
            gradient.clamp_(-limits.value, limits.value)


def _scale(parameters: Sequence[Tensor], limit: float, norm: Tensor, host_norm: float | None) -> None:
    if host_norm is not None and host_norm > torch.finfo(norm.dtype).max:
        # The norm does not fit its type: scale in two steps that do.
        gradients = collect(parameters)
        largest = float(peak(gradients))  # type: ignore[arg-type]
        torch._foreach_div_(gradients, largest)
        torch._foreach_mul_(gradients, limit / (host_norm / largest))
    else:
        clip_grads_with_norm_(parameters, limit, norm)
