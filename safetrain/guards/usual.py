"""The recent range of a signal: its level, trend, spread and tail, from the committed steps before."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.history import Recent

BLOCK = 24
"""Steps that the level is taken over. The trend is the difference between two such blocks."""
IN_A_ROW = {2: 1.9, 3: 1.0, 4: 0.8, 5: 0.67}
"""Deviations needed, in units of `z`, when this many values in a row are all above: one outlier is common, five in a row are not."""
SKEWED = 0.15
"""Deviation of the logarithms above which the tail is long, and limits are taken from the logarithms."""
REFRESH = 4
"""Steps between two computations of the bound that nearly every value is below."""


class Usual:
    """Judges upward only. A value is *high* if it stands out of the tail of what was seen, or if several in a row are above the level."""

    def __init__(self, window: int, min_ratio: float) -> None:
        self._min_ratio = min_ratio
        self.values = Recent(window)
        self._tail = Recent(4 * window)
        """How far above the level each value was, for longer than the values themselves are kept."""
        self._bound = math.inf
        self._age = 0

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usual) and self.state_dict() == other.state_dict()

    __hash__ = None  # type: ignore[assignment]

    def clear(self) -> None:
        """The level is a new one. How long the tail is stays known."""
        self.values.clear()
        self._bound, self._age = math.inf, 0

    def add(self, value: float) -> None:
        if len(self.values) >= 8:
            self._tail.add(value - self._bound)
        self.values.add(value)
        self._age += 1
        if self._age >= REFRESH and len(self.values) >= 8:
            self._age, self._bound = 0, self.level()

    def level(self) -> float:
        """The median of the newest steps, moved on to the present if they fall."""
        values = list(self.values)
        newest, before = values[-BLOCK:], values[-2 * BLOCK : -BLOCK]
        center = statistics.median(newest)
        if len(before) < BLOCK:
            return center
        # The flatter of the trends over a block and over half of one: a steep fall at the start ends soon.
        half = BLOCK // 2
        of_halves = (statistics.median(newest[half:]) - statistics.median(newest[:half])) / half
        trend = max((center - statistics.median(before)) / BLOCK, of_halves)
        return center + min(0.0, trend) * (BLOCK + 1) / 2

    def high(self, value: float, z: float) -> tuple[float, float, int] | None:
        """Level, deviations above it, and over how many values, if this value and those before it are too high; else None."""
        if not value > self._bound:
            return None  # about half of the steps end here, before anything is sorted
        level = self.level()
        spread, log_spread = self._spreads()
        limits = _Limits(level, spread, log_spread, self._min_ratio)
        run = value
        earlier = list(self.values)
        for count in range(1, 6):
            if count > 1:
                if len(earlier) < count + BLOCK:
                    return None
                run = min(run, earlier[1 - count])
            is_high = self._is_out_of_tail(run, limits, z) if count == 1 else run > limits.at(z * IN_A_ROW[count])
            if is_high:
                deviations = (run - level) / spread if spread > 0 else math.inf
                return level, deviations, count
        return None

    def is_above(self, value: float, z: float) -> bool:
        """A single value is so many deviations above the level."""
        return value > _Limits(self.level(), *self._spreads(), self._min_ratio).at(z)

    def jumps(self, value: float) -> bool:
        """It comes from the usual level in one step, and far out."""
        return self.is_above(value, 10.0) and not self.is_above(self.values[-1], 5.0)

    def _is_out_of_tail(self, value: float, limits: _Limits, z: float) -> bool:
        """Far above, and twice as far as any for a long time."""
        return value > limits.at(3.5 * z) and value - limits.level > 2.0 * max(self._tail.largest, 0.0)

    def _spreads(self) -> tuple[float, float]:
        """Robust deviations of a value and of its logarithm, from neighbours, so that a trend does not count as noise."""
        values = list(self.values)
        spread = _deviation(values)
        log_spread = _deviation([math.log(value) for value in values]) if min(values) > 0.0 else 0.0
        return spread, log_spread

    def state_dict(self) -> dict[str, Any]:
        bound = self._bound if math.isfinite(self._bound) else None
        return {"values": list(self.values), "tail": list(self._tail), "bound": bound, "age": self._age}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.values.maxlen is not None
        assert self._tail.maxlen is not None
        self.values = Recent(self.values.maxlen, state["values"])
        self._tail = Recent(self._tail.maxlen, state["tail"])
        self._bound = math.inf if state["bound"] is None else state["bound"]
        self._age = state["age"]


class _Limits:
    def __init__(self, level: float, spread: float, log_spread: float, min_ratio: float) -> None:
        self.level, self._spread, self._log_spread = level, spread, log_spread
        self._least = level + (min_ratio - 1.0) * abs(level)

    def at(self, z: float) -> float:
        """The limit that is `z` deviations above the level: of the values, of their logarithms, and never closer than `min_ratio`."""
        has_long_tail = self.level > 0.0 and self._log_spread > SKEWED
        of_logs = self.level * math.exp(min(z * self._log_spread, 700.0)) if has_long_tail else -math.inf
        return max(self._least, self.level + z * self._spread, of_logs)


def _deviation(values: Sequence[float]) -> float:
    differences = [abs(after - before) for before, after in itertools.pairwise(values)]
    return 1.4826 * statistics.median(differences) / math.sqrt(2.0) if differences else 0.0
