"""The current phase of this process, how long it has taken, and how long it usually takes. Written by the thread that
trains, read by the watchdog's."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic

FACTOR = 5.0
"""What takes this many times the usual time is late."""
FLOOR_SECONDS = 5.0
"""Nothing shorter is."""
FIRST_SECONDS = 30.0
"""Of what has not been done before: the first step may compile the model, the first save may meet a cold disk."""
RECOVERY_SECONDS = 120.0
"""An investigation replays the step dozens of times."""
NUM_KEPT = 32

STEP, BATCH = "step", "evaluation batch"
LOOP = "loop"
"""What a loop that is not ours does between two steps: that may take any time."""
_ALONE = {"investigating", "recovering"}
"""Work whose duration says nothing about the next time."""


@dataclass(frozen=True)
class Late:
    """Something that takes much longer than it usually does."""

    unit: str
    """`step`, `evaluation batch`, or what else is being done."""
    number: int
    """Of this unit in this process: equal as long as it is the same one."""
    seconds: float
    usual: float | None
    """Seconds; None if it was not done before."""

    def describe(self) -> str:
        usually = "for the first time" if self.usual is None else f"usually {_seconds(self.usual)}"
        return f"{self.unit} takes {_seconds(self.seconds)} so far, {usually}"


class Activity:
    def __init__(self) -> None:
        self.step = -1
        self.phase, self.is_waiting, self.since = "starting", False, monotonic()
        self._unit, self._number, self._began = "start", 0, monotonic()
        self._durations: dict[str, deque[float]] = {}
        self._interrupted: tuple[str, float] | None = None
        self.own_seconds = {"data": 0.0, "forward": 0.0}
        """Spent on the data, and on all else up to the end of the forward pass, since `take_own_seconds`: by this process alone, without
        waiting for others."""
        self.samples_at: dict[str, Callable[[int], Sequence[int] | None]] = {}
        """By unit: indices in the data set of the N-th batch that the present iterator over its data gives; None if not known."""

    # ---- marks, set by the thread that trains: a few assignments each --------------------------------------------------------------

    def at(self, phase: str, step: int | None = None, waiting: bool = False) -> None:
        """`waiting`: for other ranks."""
        now = monotonic()
        if not self.is_waiting and self.phase != "backward pass":
            kind = "data" if self.phase == "wait for training data" else "forward"
            self.own_seconds[kind] += now - self.since
        self.phase, self.is_waiting, self.since = phase, waiting, now
        if step is not None:
            self.step = step

    def begin(self, unit: str, phase: str | None = None) -> None:
        """The last unit is done, and another begins, with this phase: a step, or a batch of an evaluation."""
        now = monotonic()
        if unit == self._unit:
            self._durations.setdefault(unit, deque(maxlen=NUM_KEPT)).append(now - self._began)
        self._unit, self._number, self._began = unit, self._number + 1, now
        if phase is not None:
            self.at(phase)

    def doing(self, what: str | None) -> None:
        """Something other than the step in progress, or, with None, the step again. What it took is not the step's."""
        now = monotonic()
        if self._interrupted is not None and (what is None or self._unit != STEP):
            unit, spent = self._interrupted
            if self._unit not in (BATCH, *_ALONE):
                self._durations.setdefault(self._unit, deque(maxlen=NUM_KEPT)).append(now - self._began)
            self._unit, self._number, self._began = unit, self._number + 1, now - spent
            self._interrupted = None
        if what is not None:
            self._interrupted = self._unit, now - self._began
            self._unit, self._number, self._began = what.split()[0], self._number + 1, now
        self.at("step" if what is None else what)

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Inside, this process waits for others."""
        before, was_waiting = self.phase, self.is_waiting
        self.at(phase, waiting=True)
        yield
        self.at(before, waiting=was_waiting)

    def take_own_seconds(self) -> tuple[float, float]:
        """Data and forward since the last call."""
        self.at(self.phase, waiting=self.is_waiting)
        taken = self.own_seconds["data"], self.own_seconds["forward"]
        self.own_seconds = {"data": 0.0, "forward": 0.0}
        return taken

    # ---- for the watchdog ------------------------------------------------------------------------------------------

    def samples(self, index: int) -> Sequence[int] | None:
        find = self.samples_at.get(self._unit)
        return None if find is None else find(index)

    def late(self) -> Late | None:
        """What is being done, if it takes much longer than usual."""
        unit, number, began = self._unit, self._number, self._began
        seconds, usual = monotonic() - began, self._usual(unit)
        return Late(unit, number, seconds, usual) if seconds > self._limit(unit, usual) else None

    @property
    def number(self) -> int:
        return self._number

    def _usual(self, unit: str) -> float | None:
        known = self._durations.get(unit) or (self._durations.get(STEP) if unit == BATCH else None)
        return median(tuple(known)) if known else None

    def _limit(self, unit: str, usual: float | None) -> float:
        if unit == LOOP:
            return math.inf
        if unit in _ALONE:
            return max(RECOVERY_SECONDS, 100 * (self._usual(STEP) or 0.0))
        return FIRST_SECONDS if usual is None else max(FLOOR_SECONDS, FACTOR * usual)

    def where(self) -> str:
        """`in its forward pass of step 3`."""
        return f"in its {self.phase}" + (f" of step {self.step}" if self.step >= 0 else "")


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 2 else f"{value:.2g} s"
