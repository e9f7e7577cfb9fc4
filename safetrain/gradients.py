"""One place computes the gradient norm that is logged, judged and clipped by; one place clips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .view import Limits, StepView


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
    filled = [numbers_of(t) for t in tensors if t.numel()]
    return get_total_norm(filled, math.inf) if filled else None


def numbers_of(tensor: Tensor) -> Tensor:
    """The numbers that a tensor stores: those of a sparse one, and in a type that norms are defined for."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8


def overflow_free_norm(gradients: Sequence[Tensor]) -> float | None:
    """The true norm when float32 overflowed to Inf, or None when a gradient really is non-finite. Reads the host."""
    largest = peak(gradients)
    if largest is None or not math.isfinite(scale := float(largest)):
        return None
    return scale * float(get_total_norm([g / scale for g in gradients]))


@torch.no_grad()
def clip(
    groups: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor],
    limits: Limits,
    norm: Tensor,
    view: StepView | None,
) -> None:
    """Bound the gradients of all parameters, and of each group of them, to `limits`, in place.

    `norm` is their global norm on the device; `view` is what the host knows of it, or None: then nothing is read here.
    """
    if limits.norm < math.inf and (view is None or view.grad_norm + 1e-6 > limits.norm):
        _scale(parameters, limits.norm, norm, overflowed=view is not None and view.norm_overflow)
    if limits.group_norm < math.inf:
        for group in groups:
            if gradients := collect(group):
                group_norm = global_norm(gradients)
                overflowed = view is not None and view.norm_overflow and math.isinf(float(group_norm))
                _scale(group, limits.group_norm, group_norm, overflowed)
    if limits.value < math.inf:
        for gradient in collect(parameters):
            parts = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            parts.clamp_(-limits.value, limits.value)


def _scale(parameters: Sequence[Tensor], limit: float, norm: Tensor, overflowed: bool) -> None:
    if not overflowed:
        clip_grads_with_norm_(parameters, limit, norm)
        return
    # The squares do not fit the type, so bring the gradients into its range first.
    gradients = collect(parameters)
    torch._foreach_div_(gradients, float(peak(gradients)))  # type: ignore[arg-type]
    torch._foreach_mul_(gradients, limit / float(global_norm(gradients)))
