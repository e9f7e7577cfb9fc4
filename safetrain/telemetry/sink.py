"""What can be told about a run, and to whom."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.incident import Incident
from ..core.result import FitResult
from ..core.verdict import Decision
from ..core.view import StepView
from .vitals import Vitals

if TYPE_CHECKING:
    from torch import Tensor

FLUSH_SECONDS = 0.25
"""Steps are told in bunches: at the latest after so long, and always before anything else is told."""
MAX_UNTOLD = 50
"""Or when they are so many: more would be enough objects for Python's garbage collector to look at them, again and again."""


class StepRecord(NamedTuple):
    """One decided step, as it is told to sinks."""

    view: StepView
    decision: Decision
    outcome: str
    """`commit`, `skip`, `rollback`, `stop`, or `overflow` (the fp16 scaler skipped it)."""
    num_committed: int

    @property
    def loss(self) -> float:
        """Of the first attempt: that of a repaired step is the bad one."""
        return self.view.loss if self.view.refused_loss is None else self.view.refused_loss

    @property
    def is_ordinary(self) -> bool:
        return self.outcome == "commit" and self.view.refused_loss is None


@dataclass(frozen=True)
class ResumePoint:
    """Where the records of a run are taken up again; what they hold beyond is of steps that will be made again."""

    step: int = 0
    journal_position: int = 0
    num_skipped: int = 0
    num_rollbacks: int = 0


class Sink:
    """Receives everything; a subclass keeps what it wants."""

    def started(self, about: Mapping[str, Any]) -> None: ...

    def noted(self, text: str) -> None: ...

    def stepped(self, records: Sequence[StepRecord]) -> None:
        """Every step, in bunches."""

    def logged(self, record: StepRecord, vitals: Vitals) -> None:
        """One step of `loop.log_every`, and every one that did not go as usual; with how the run is at that step."""

    def refreshed(self, vitals: Vitals) -> None:
        """How the run is now, a few times a second."""

    def incident(self, incident: Incident) -> None: ...

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None: ...

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None: ...

    def tensors(self, values: Mapping[str, Tensor], step: int) -> None:
        """Weights and gradients by name, before the update of this step."""

    def doing(self, what: str | None) -> None:
        """Something other than steps takes a while; None: it is over."""

    def saving(self, step: int, num_committed: int) -> None:
        """A checkpoint of this moment is about to be written. If that fails, a note says so."""

    def sync(self) -> None:
        """Whatever was told so far is to be on disk: a checkpoint of this moment is being written."""

    def finished(self, result: FitResult) -> None: ...


class Telemetry:
    """Tells every sink. All that a step costs here is an entry in a list; what it says is written in bunches."""

    def __init__(self, sinks: Iterable[Sink] = (), log_every: int = 1, vitals: Vitals | None = None) -> None:
        self.sinks = list(sinks)
        self.vitals = Vitals() if vitals is None else vitals
        self.is_busy = False
        """Something other than steps is being done."""
        self._log_every = log_every
        self._untold: list[StepRecord] = []
        self._has_news = False
        """Steps were told since the last time that it was said how the run is."""
        self._told_at = perf_counter()

    def stepped(self, record: StepRecord) -> None:
        self._untold.append(record)
        if perf_counter() - self._told_at > FLUSH_SECONDS:
            self._flush()
        elif len(self._untold) >= MAX_UNTOLD:
            self._tell_steps()

    def _flush(self) -> None:
        self._told_at = perf_counter()
        self._tell_steps()
        if self._has_news:
            self._has_news = False
            self.vitals.mark_time()
            self._tell("refreshed", self.vitals)

    def _tell_steps(self) -> None:
        records, self._untold = self._untold, []
        if not records:
            return
        self._has_news = True
        self._tell("stepped", records)
        for record in records:
            self.vitals.add(record)
            if record.view.step % self._log_every == 0 or not record.is_ordinary:
                self._tell("logged", record, self.vitals)

    def started(self, about: Mapping[str, Any]) -> None:
        self.vitals.begin(about.get("total_steps"))
        self._tell("started", about)

    def noted(self, text: str) -> None:
        self._flush()
        self._tell("noted", text)

    def incident(self, incident: Incident) -> None:
        self._flush()
        self._tell("incident", incident)

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        self._flush()
        self.vitals.rolled_back(num_committed)
        self._tell("rolled_back", to_step, num_committed, source)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._flush()
        self._tell("evaluated", metrics, is_best)

    def tensors(self, values: Mapping[str, Tensor], step: int) -> None:
        self._tell("tensors", values, step)

    def doing(self, what: str | None) -> None:
        self._flush()
        self.is_busy = what is not None
        self._tell("doing", what)

    def saving(self, step: int, num_committed: int) -> None:
        self._flush()
        self._tell("saving", step, num_committed)

    def sync(self) -> None:
        self._flush()
        self._tell("sync")

    def finished(self, result: FitResult) -> None:
        self._flush()
        self._tell("finished", result)

    def _tell(self, what: str, *about: Any) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, what)(*about)
            except BrokenPipeError:  # whoever read the output has gone; that is no reason to stop training
                self.sinks.remove(sink)
                _silence_output()


def _silence_output() -> None:
    """What is still written to the standard output goes nowhere, instead of failing when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
