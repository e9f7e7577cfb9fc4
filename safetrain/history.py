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

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        self.values.append(value)

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
        return max(self.values)


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
