"""One place computes the gradient norm that is logged, judged and clipped by; one place clips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .._private import foreach
from .._private.storage import sparse_values
from ..core.view import Limits, StepView
from ..distributed.comm import gather
from .sharded import any_dtensor, local, total_norm


def collect(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that exist, as dense tensors. Of a sparse one the values, each row once: its own if `_merge_rows` came before."""
    return [
        gradient.coalesce().values() if gradient.is_sparse else gradient  # a row that is there twice would count twice
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    ]


def _merge_rows(parameters: Iterable[Tensor]) -> None:
    """Of sparse gradients, so that what `collect` gives may be written to. An update by them is rounded differently, so only
    gradients that are clipped are changed."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()


def are_uniform(parameters: Sequence[Tensor]) -> bool:
    """Ordinary tensors of one type on one device: their gradients are so, too, and need not be sorted by that each step."""
    kinds = {(type(p), p.dtype, p.device) for p in parameters}
    return len(kinds) == 1 and all(kind is nn.Parameter and device.type in FOREACH for kind, _, device in kinds)


FOREACH = ("cpu", "cuda")
"""Devices on which `clip_grad_norm_` takes the norms of many tensors at once."""


def global_norm(gradients: list[Tensor], uniform: bool = False) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` computes it, bit for bit; stays on the device. `uniform`: see `are_uniform`."""
    if uniform and gradients:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach.norms(gradients)))
        return norm
    return total_norm(gradients) if any_dtensor(gradients) else get_total_norm(gradients)


def peak(tensors: Sequence[Tensor]) -> Tensor | None:
    """Largest absolute value; NaN and Inf propagate, and unlike the L2 norm it cannot overflow. In this process's parts."""
    tensors = [local(t) for t in tensors] if any_dtensor(tensors) else tensors
    filled = [numbers_of(t) for t in tensors if t.numel()]
    if not filled:
        return None
    on_cpu = [t for t in filled if t.is_cpu]
    if len(on_cpu) == len(filled):
        return _peak_on_cpu(filled)
    largest = get_total_norm([t for t in filled if not t.is_cpu], math.inf)
    if not on_cpu:
        return largest
    # An optimizer keeps its step counters on the host. Each of them would be a copy to the device that is waited for.
    return torch.maximum(largest, torch.full_like(largest, float(_peak_on_cpu(on_cpu))))


@torch.no_grad()
def _peak_on_cpu(tensors: Sequence[Tensor]) -> Tensor:
    """There the norm of infinite order takes twenty times as long as finding both ends."""
    real = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    ends = [end for tensor in real for end in torch.aminmax(tensor)]
    if any(end.dtype is not ends[0].dtype for end in ends):
        ends = [end.double() for end in ends]
    return torch.stack(ends).abs().amax()


def numbers_of(tensor: Tensor) -> Tensor:
    """The numbers that a tensor stores: those of a sparse one, and in a type that norms are defined for."""
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    elif tensor.layout is not torch.strided:
        tensor = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8


def overflow_free_norm(gradients: Sequence[Tensor]) -> float | None:
    """The true norm when float32 overflowed to Inf, or None when a gradient really is non-finite. Reads the host."""
    if not gradients or not math.isfinite(scale := _largest(gradients)):
        return None
    return scale * float(global_norm([g / scale for g in gradients]))


def _largest(gradients: Sequence[Tensor]) -> float:
    """As `peak`, over all processes if the gradients are sharded."""
    largest = peak(gradients)
    own = 0.0 if largest is None else float(largest)
    return float(torch.tensor(gather(own)).max()) if any_dtensor(gradients) else own


def clip(
    groups: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor],
    limits: Limits,
    norm: Tensor,
    view: StepView | None,
) -> None:
    """Bound the gradients of all parameters, and of each group of them, to `limits`, in place.

    `norm` is their `global_norm` on the device. `view` is what the host knows of it, or None: then nothing is read here.
    """
    # torch scales by limit / (norm + 1e-6), which is below 1 from here on.
    if limits.norm < math.inf and (view is None or view.grad_norm + 1e-6 > limits.norm * (1 - 1e-6)):
        _scale(parameters, limits.norm, norm, view is not None and view.norm_overflow)
    if limits.group_norm < math.inf:
        for group in groups:
            if gradients := collect(group):
                group_norm = global_norm(gradients)
                overflowed = view is not None and view.norm_overflow and math.isinf(float(group_norm))
                _scale(group, limits.group_norm, group_norm, overflowed)
    if limits.value < math.inf:
        _merge_rows(parameters)
        for gradient in collect(parameters):
            parts = torch.view_as_real(gradient) if gradient.is_complex() else local(gradient)
            parts.detach().clamp_(-limits.value, limits.value)


@torch.no_grad()
def _scale(parameters: Sequence[Tensor], limit: float, norm: Tensor, overflowed: bool) -> None:
    _merge_rows(parameters)
    if not overflowed and not any_dtensor(parameters):
        clip_grads_with_norm_(parameters, limit, norm)
        return
    gradients = collect(parameters)
    parts = [local(gradient) for gradient in gradients]
    if not overflowed:
        foreach.mul_(parts, torch.clamp(limit / (norm + 1e-6), max=1.0).to(parts[0].device))
        return
    # The squares do not fit the type, so bring the gradients into its range first.
    foreach.div_(parts, _largest(gradients))
    foreach.mul_(parts, limit / float(global_norm(gradients)))
