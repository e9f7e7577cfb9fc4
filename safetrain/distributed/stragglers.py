"""Ranks that are slower than the others in their own work: reading data, and everything else up to the end of the
forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PHASES = ("data", "forward")
WINDOW = 64
"""Steps over which the time is summed."""
FACTOR = 1.5
"""Of the median over the ranks, from which a rank is slow."""
SHARE = 0.1
"""Of the whole step that it must cost the others."""


@dataclass(frozen=True)
class Straggler:
    rank: int
    phase: str
    seconds: float
    """For each step."""
    median: float
    """Over all ranks."""

    def describe(self) -> str:
        return (
            f"rank {self.rank} is slow: its {self.phase} takes {1000 * self.seconds:.1f} ms of a step, {1000 * self.median:.1f} ms on "
            f"the median rank, and the others wait for it"
        )


class Stragglers:
    def __init__(self, world_size: int) -> None:
        self._sums = np.zeros((world_size, len(PHASES)))
        self._count = 0
        self._began = 0.0
        self._known: set[tuple[int, str]] = set()

    def add(self, seconds: NDArray[Any], now: float) -> list[Straggler]:
        """`seconds`: of each rank and phase, in a step; the same on all ranks. Returns those that are newly found to be slow."""
        if self._count == 0:
            self._began = now
        self._sums += seconds
        self._count += 1
        if self._count < WINDOW:
            return []
        means, step = self._sums / self._count, (now - self._began) / (self._count - 1)
        self._sums[:] = self._count = 0
        found = []
        for index, phase in enumerate(PHASES):
            median = float(np.median(means[:, index]))
            for rank in np.flatnonzero((means[:, index] > FACTOR * median) & (means[:, index] - median > SHARE * step)):
                slow = Straggler(int(rank), phase, float(means[rank, index]), median)
                if (slow.rank, phase) not in self._known:
                    self._known.add((slow.rank, phase))
                    found.append(slow)
        return found
