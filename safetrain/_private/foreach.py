"""torch's `_foreach_*` functions: one call for many tensors. Without it: one for each, with the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .feature import Feature


def _probe() -> bool:
    ours, theirs = [torch.zeros(2)], [torch.ones(2)]
    torch._foreach_copy_(ours, theirs)
    torch._foreach_mul_(ours, 6.0)
    torch._foreach_div_(ours, 2.0)
    torch._foreach_lerp_(ours, theirs, 0.5)
    return float(torch._foreach_norm(ours)[0]) == float(torch.linalg.vector_norm(torch.full((2,), 2.0)))


FOREACH = Feature(
    "foreach",
    relies_on="torch._foreach_copy_, _norm, _mul_, _div_, _lerp_",
    lost="one call for the copies, norms and averages of all tensors",
    instead="one call for each tensor, which is slower; the numbers are the same",
    probe=_probe,
)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if not targets:
        return
    if FOREACH.works:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    if FOREACH.works:
        return list(torch._foreach_norm(list(tensors)))
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def mul_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    if FOREACH.works:
        torch._foreach_mul_(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def div_(tensors: Sequence[Tensor], divisor: float) -> None:
    if FOREACH.works:
        torch._foreach_div_(list(tensors), divisor)
        return
    for tensor in tensors:
        tensor.div_(divisor)


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    if FOREACH.works:
        torch._foreach_lerp_(list(tensors), list(ends), weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)
