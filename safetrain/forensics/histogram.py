"""Histogram of the values of an operand, small enough to be kept with an incident."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..tensors.devices import wide, widest_float
from .values import numbers, values_at

NUM_BINS = 32
LARGEST = 2**22
"""Values that are counted; of a larger operand, evenly spaced ones."""
SPREAD = 1000.0
"""The largest magnitude over a small one (the tenth percentile) from which bins follow orders of magnitude."""
NUM_DECADES = 16
"""Below the largest magnitude; what is smaller shares the bin around 0."""


def histogram(tensor: Tensor, bad: Tensor | None = None) -> dict[str, Any] | None:
    """Counts of the finite values that are not 0, between `edges`: zeros, NaN and Inf are in the operand's statistics.

    `bad` marks the positions where the op's output is bad; if the operand has a value at each, those are counted in `at_bad`,
    and the zeros among them in `zeros_at_bad`. None for a tensor without any values.
    """
    values = numbers(tensor)
    if values is None or tensor.is_complex():
        return None
    stride = math.ceil(values.numel() / LARGEST)
    counted = _countable(values.flatten()[::stride])
    edges, scale = _edges(counted) if counted.numel() else ([], "linear")
    result: dict[str, Any] = {"scale": scale, "edges": edges, "counts": _counts(counted, edges)}
    if stride > 1:
        result["every"] = stride
    if bad is not None and tensor.layout is torch.strided:
        at_bad = values_at(values, bad)
        if at_bad is None:
            return result
        result["zeros_at_bad"] = int((at_bad == 0).sum())
        result["at_bad"] = _counts(_countable(at_bad[:: max(1, math.ceil(at_bad.numel() / LARGEST))]), edges)
    return result


def _countable(values: Tensor) -> Tensor:
    return wide(values[torch.isfinite(values) & (values != 0)])


def _edges(values: Tensor) -> tuple[list[float], str]:
    low, high = values.min().item(), values.max().item()
    magnitudes = values.abs()
    largest = magnitudes.max().item()
    sample = magnitudes[:: math.ceil(magnitudes.numel() / 10_000)]
    if low == high:
        return [_rounded(low), _rounded(high)], "linear"
    if largest <= SPREAD * torch.quantile(sample, 0.1).item():
        # Not low + (high - low) * t, whose difference can overflow.
        return _distinct(low * (1 - i / NUM_BINS) + high * (i / NUM_BINS) for i in range(NUM_BINS + 1)), "linear"
    floor = math.log10(max(magnitudes.min().item(), largest * 10.0**-NUM_DECADES, 5e-324))
    sides = []
    if low < 0:
        sides += [-edge for edge in reversed(_powers(floor, math.log10(-low), high > 0))]
    if high > 0:
        sides += _powers(floor, math.log10(high), low < 0)
    return _distinct(sides), "log"


def _powers(first: float, last: float, shared: bool) -> list[float]:
    """Evenly spaced powers of ten; half of the bins when the other half is for the other sign."""
    num_bins = NUM_BINS // 2 if shared else NUM_BINS
    last = max(first, last)  # a side with nothing but tiny values
    return [10.0 ** min(first + (last - first) * i / num_bins, 308.25) for i in range(num_bins + 1)]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _distinct(edges: Any) -> list[float]:
    """Rounded, because every digit is written to the incident; edges that are then equal are merged."""
    found = list(dict.fromkeys(_rounded(edge) for edge in edges))
    return found if len(found) > 1 else found * 2


def _counts(values: Tensor, edges: list[float]) -> list[int]:
    if not edges:
        return []
    inner = torch.tensor(edges[1:-1], dtype=widest_float(values.device), device=values.device)
    found = torch.bincount(torch.bucketize(values, inner, right=True), minlength=len(edges) - 1)
    counts: list[int] = found.tolist()
    return counts
