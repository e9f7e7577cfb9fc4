"""Running statistics that guards keep over committed steps; plain numbers, so that they survive JSON."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


class Recent:
    """The last `size` values."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recent) and self.values == other.values

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=size)
        self._largest = max(self.values, default=-math.inf)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        values = self.values
        leaving = values[0] if len(values) == values.maxlen else -math.inf
        values.append(value)
        if value >= self._largest:
            self._largest = value
        elif not leaving < self._largest:
            self._largest = max(values)

    def clear(self) -> None:
        self.values.clear()
        self._largest = -math.inf

    @property
    def center(self) -> float:
        """The median: half of the values may be outliers and it does not move far."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation, at least the robust one: rare hard batches widen it, so they are not taken for spikes."""
        center = self.center
        robust = 1.4826 * statistics.median(abs(v - center) for v in self.values)
        return max(robust, math.sqrt(sum((v - center) ** 2 for v in self.values) / len(self.values)))

    @property
    def largest(self) -> float:
        """-inf if there is none. Known at any time, because it is asked for in every step."""
        return self._largest


@dataclass
class Smooth:
    """An exponential average that starts as the plain mean of the first values."""

    decay: float
    mean: float = 0.0
    count: int = 0

    def add(self, value: float) -> float:
        self.count += 1
        self.mean += max(1.0 - self.decay, 1.0 / self.count) * (value - self.mean)
        return self.mean
