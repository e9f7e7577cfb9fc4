"""What can be told about a run, and to whom."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..incident import Incident
from ..result import FitResult
from ..verdict import Decision
from ..view import StepView


@dataclass(frozen=True)
class StepRecord:
    """One decided step, as it is told to sinks."""

    view: StepView
    decision: Decision
    outcome: str
    """`commit`, `skip`, `rollback`, `stop`, or `overflow` (the fp16 scaler skipped it)."""
    num_committed: int
    epoch: int


@dataclass(frozen=True)
class ResumePoint:
    """Where the records of a run are taken up again; what they hold beyond is of steps that will be made again."""

    step: int = 0
    journal_position: int = 0
    num_skipped: int = 0


class Sink:
    """Receives everything; a subclass keeps what it wants."""

    def started(self, about: Mapping[str, object]) -> None: ...

    def noted(self, text: str) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def incident(self, incident: Incident) -> None: ...

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None: ...

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None: ...

    def sync(self) -> None:
        """Whatever was told so far is to be on disk: a checkpoint of this moment is being written."""

    def finished(self, result: FitResult) -> None: ...


class Telemetry(Sink):
    """Tells every sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = list(sinks)

    def started(self, about: Mapping[str, object]) -> None:
        self._tell("started", about)

    def noted(self, text: str) -> None:
        self._tell("noted", text)

    def stepped(self, record: StepRecord) -> None:
        self._tell("stepped", record)

    def incident(self, incident: Incident) -> None:
        self._tell("incident", incident)

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        self._tell("rolled_back", to_step, num_committed, source)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._tell("evaluated", metrics, is_best)

    def sync(self) -> None:
        self._tell("sync")

    def finished(self, result: FitResult) -> None:
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
