"""Running statistics that guards keep over committed steps; plain numbers, so that they survive JSON."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class Recent(deque[float]):
    """The last `size` values."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        super().__init__(values, maxlen=size)
        self.largest = max(self, default=-math.inf)
        """-inf if there is none. Kept up to date, because it is asked for in every step."""

    def __reduce__(self) -> Any:  # a deque's own would call the constructor of a deque
        return type(self), (self.maxlen, list(self))

    def add(self, value: float) -> None:
        leaving = self[0] if len(self) == self.maxlen else -math.inf
        self.append(value)
        if value >= self.largest:
            self.largest = value
        elif not leaving < self.largest:
            self.largest = max(self)

    def clear(self) -> None:
        super().clear()
        self.largest = -math.inf

    @property
    def center(self) -> float:
        """The median: half of the values may be outliers and it does not move far."""
        return statistics.median(self)

    @property
    def spread(self) -> float:
        """Standard deviation, at least the robust one: rare hard batches widen it, so they are not taken for spikes."""
        center = self.center
        robust = 1.4826 * statistics.median(abs(v - center) for v in self)
        return max(robust, math.sqrt(sum((v - center) ** 2 for v in self) / len(self)))


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
