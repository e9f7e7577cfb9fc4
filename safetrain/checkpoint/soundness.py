"""Whether the tensors of a training state are sound: finite, no negative second moment, no implausible growth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..tensors.sharded import any_dtensor, local

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
JUMP, FATAL_JUMP = 1e3, 1e6
FLOORS = {"model": 1e-2, "extra": 1e-2, "ema": 1e-2, "optimizer": 1.0}
"""Smaller peaks count as this when looking for jumps: tensors that start at zero are expected to grow."""


def is_second_moment(name: str) -> bool:
    return name.startswith("optimizer/") and name.endswith(SECOND_MOMENTS)


def peaks_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each floating-point tensor, or of this process's part of it; both are NaN if one of its values is."""
    is_sharded = any_dtensor(tensors.values())
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = local(tensor) if is_sharded else tensor
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            real = real.float() if real.element_size() == 1 else real  # nothing is defined for float8
            kinds.setdefault((real.device, real.dtype), {})[name] = real
    peaks: dict[str, tuple[float, float]] = {}
    for named in kinds.values():
        peaks.update(zip(named, _extremes(list(named.values())), strict=True))
    return peaks


@torch.no_grad()
def _extremes(tensors: list[Tensor]) -> Iterable[tuple[float, float]]:
    ends = torch.stack([end for tensor in tensors for end in torch.aminmax(tensor)])
    numbers = iter(ends.cpu().double().numpy().tolist())  # one transfer for each kind of tensor
    return zip(numbers, numbers, strict=True)


def problems_in(peaks: Mapping[str, tuple[float, float]], ignored: Sequence[str]) -> dict[str, str]:
    problems = {}
    for name, (low, high) in peaks.items():
        if not (math.isfinite(low) and math.isfinite(high)) and name not in ignored:
            problems[name] = "holds NaN" if math.isnan(low) else "holds Inf"
        elif low < 0.0 and is_second_moment(name):
            problems[name] = f"a second moment of {low:.3g}"
    return problems


def jumps(
    peaks: Mapping[str, tuple[float, float]],
    before: Mapping[str, tuple[float, float]] | None,
    ignored: Sequence[str],
    factor: float = JUMP,
) -> dict[str, str]:
    """Weights, averages and moments that grew by the factor. Buffers (`ignored`) may: they follow the data."""
    found = {}
    for name, (low, high) in peaks.items():
        floor = FLOORS.get(name.partition("/")[0])
        if before is None or name not in before or floor is None or name in ignored:
            continue
        now, then = max(-low, high), max(-before[name][0], before[name][1])
        if now > factor * max(then, floor):
            found[name] = f"grew from {then:.3g} to {now:.3g}"
    return found
