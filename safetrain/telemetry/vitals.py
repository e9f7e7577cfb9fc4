"""The state of a run at one moment, as the progress line, TensorBoard and trackers show it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from ..core.history import Recent

if TYPE_CHECKING:
    from .sink import StepRecord

HEALTHY, RECOVERING, REFUSED, ROLLED_BACK, STOPPED = range(5)
STATUS = ("healthy", "recovering", "refused", "rolled back", "stopped")
_OF_OUTCOME = {"skip": REFUSED, "rollback": ROLLED_BACK, "stop": STOPPED}

RECOVERY_STEPS = 100
"""A run counts as recovering for this many steps after a refusal."""
RATE_SECONDS = 30.0
"""The throughput is a mean over this time."""


class Vitals:
    """Running statistics over the steps of a run, which are added in order. Costs about a microsecond a step."""

    def __init__(self, num_skipped: int = 0, num_rollbacks: int = 0) -> None:
        self.num_skipped, self.num_rollbacks = num_skipped, num_rollbacks
        self.num_repaired = self.num_overflows = 0
        self.num_bad_losses = self.num_bad_gradients = 0
        """Steps whose loss, or whose gradient norm, was not finite; what the fp16 scaler handles is not counted."""
        self.last: StepRecord | None = None
        self.total_steps: int | None = None
        self.gauges: dict[str, Callable[[], float]] = {}
        """Further numbers by their tag, called when something is logged; NaN: not known yet, left out."""
        self._grad_norms: deque[float] = deque(maxlen=500)
        self._clipped: deque[bool] = deque(maxlen=500)
        self.recent_losses = Recent(100)
        self._last_refusal = -RECOVERY_STEPS - 1
        self._marks: deque[tuple[float, int]] = deque(maxlen=200)
        self._seen = 0

    def begin(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._marks.append((perf_counter(), self._seen))

    def add(self, record: StepRecord) -> None:
        view, loss = record.view, record.loss
        self._seen += 1
        self.last = record
        if record.outcome == "overflow":
            self.num_overflows += 1
            self.num_skipped += 1
            return
        if not record.is_ordinary:
            if record.outcome == "commit":
                self.num_repaired += 1
            else:
                self.num_skipped += 1
                self._last_refusal = view.step
        # Without guards a non-finite step is committed like any other.
        if math.isfinite(loss):
            if record.is_ordinary:
                self.recent_losses.add(loss)
        else:
            self.num_bad_losses += 1
        if math.isfinite(view.grad_norm):
            if record.outcome == "commit":
                self._grad_norms.append(view.grad_norm)
                self._clipped.append(view.grad_norm > view.limits.norm)
        else:
            self.num_bad_gradients += 1

    def mark_time(self) -> None:
        now = perf_counter()
        self._marks.append((now, self._seen))
        while len(self._marks) > 2 and now - self._marks[0][0] > RATE_SECONDS:
            self._marks.popleft()

    # ---- derived from it ----------------------------------------------------------------------------------

    @property
    def status(self) -> int:
        """An index into `STATUS`."""
        if self.last is None:
            return HEALTHY
        if self.last.outcome in _OF_OUTCOME:
            return _OF_OUTCOME[self.last.outcome]
        is_recent = self.last.view.step - self._last_refusal <= RECOVERY_STEPS
        recovers = is_recent or self.last.decision.lr_scale != 1.0 or not self.last.is_ordinary
        return RECOVERING if recovers else HEALTHY

    @property
    def steps_per_second(self) -> float:
        """Over the last half minute, with all that happened in it. NaN before the first steps are known."""
        if len(self._marks) < 2:
            return math.nan
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - begin) if end > begin else math.nan

    @property
    def seconds_left(self) -> float:
        """NaN when it is not known."""
        if self.total_steps is None or self.last is None or not self.steps_per_second > 0:
            return math.nan
        return max(self.total_steps - self.last.num_committed, 0) / self.steps_per_second

    @property
    def loss_z(self) -> float:
        """How many deviations the newest loss is from the median of the committed ones before it; NaN for a NaN loss."""
        if self.last is None or len(self.recent_losses) < 10:
            return math.nan
        spread, away = self.recent_losses.spread, self.last.loss - self.recent_losses.center
        if spread > 0 or math.isnan(away):
            return away / spread if spread > 0 else math.nan
        return math.copysign(math.inf, away) if away else 0.0

    def grad_norm_percentiles(self) -> dict[int, float]:
        """Of the recent committed steps."""
        norms = sorted(self._grad_norms)
        return {p: norms[min(p * len(norms) // 100, len(norms) - 1)] for p in (50, 95, 99)} if norms else {}

    @property
    def clip_fraction(self) -> float:
        """Share of the recent committed steps whose gradient was bounded by its norm."""
        return sum(self._clipped) / len(self._clipped) if self._clipped else math.nan
