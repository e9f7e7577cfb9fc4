"""Curves and marks of any length in bounded memory: downsampled for a plot, keeping extremes and every NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 1024
"""Each keeps its smallest and its largest value; about one bin per pixel of a wide screen."""
PENDING = 2**16
"""Points that are collected before they are downsampled."""

Floats = NDArray[np.float64]


class Series:
    """`(step, value)` pairs sorted by step. Non-finite values become marks, so that a plot can show where they were."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._values: list[float] = []
        self.nan, self.inf = Marks(), Marks()
        self.num_values = 0
        self.last = math.nan
        """The newest value, finite or not."""

    def add(self, step: int, value: float) -> None:
        self.num_values += 1
        self.last = value
        if value - value != 0.0:  # NaN and Inf only
            (self.nan if value != value else self.inf).add(step)
            return
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) >= PENDING:
            self._downsample(NUM_BINS)

    def points(self, num_bins: int = NUM_BINS) -> tuple[Floats, Floats]:
        """Steps and values, at most two for each bin; all of them if there are few."""
        if len(self._steps) > 2 * num_bins:
            self._downsample(num_bins)
        return np.asarray(self._steps, dtype=np.float64), np.asarray(self._values, dtype=np.float64)

    def __bool__(self) -> bool:
        return self.num_values > 0

    def _downsample(self, num_bins: int) -> None:
        steps, values = np.asarray(self._steps, dtype=np.float64), np.asarray(self._values, dtype=np.float64)
        bins = _bins(steps, num_bins)
        by_value = np.lexsort((values, bins))
        is_first = np.diff(bins[by_value], prepend=-1) != 0
        is_last = np.diff(bins[by_value], append=num_bins + 1) != 0
        kept = np.union1d(by_value[is_first | is_last], [0, len(steps) - 1])  # sorts by step again
        self._steps, self._values = steps[kept].tolist(), values[kept].tolist()


@dataclass(frozen=True)
class Span:
    """Neighbouring marks that a plot cannot separate."""

    first: float
    last: float
    count: int


class Marks:
    """Steps at which something happened; neighbours are merged if there are many."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._counts: list[int] = []
        self.count = 0

    def add(self, step: int) -> None:
        self.count += 1
        self._first.append(step)
        self._last.append(step)
        self._counts.append(1)
        if len(self._first) >= PENDING:
            self._merge(self._last[-1] / NUM_BINS)

    def spans(self, gap: float) -> list[Span]:
        """Marks at most `gap` steps apart are merged."""
        self._merge(gap)
        return [Span(*span) for span in zip(self._first, self._last, self._counts, strict=True)]

    def __bool__(self) -> bool:
        return self.count > 0

    def _merge(self, gap: float) -> None:
        if not self._first:
            return
        first, last = np.asarray(self._first), np.asarray(self._last)
        begins = np.concatenate([[True], first[1:] - last[:-1] > gap])
        starts = np.flatnonzero(begins)
        ends = np.append(starts[1:], len(first)) - 1
        self._first, self._last = first[starts].tolist(), last[ends].tolist()
        self._counts = np.add.reduceat(np.asarray(self._counts), starts).tolist()


def _bins(steps: Floats, num_bins: int) -> NDArray[np.int64]:
    low, high = steps.min(), steps.max()
    scaled = (steps - low) * (num_bins / max(high - low, 1.0))
    found: NDArray[np.int64] = np.minimum(scaled.astype(np.int64), num_bins - 1)
    return found
