"""What can be told about a run, and to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


class Sink:
    """Receives everything; a subclass keeps what it wants."""

    def started(self, about: Mapping[str, object]) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def incident(self, incident: Incident) -> None: ...

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None: ...

    def finished(self, result: FitResult) -> None: ...


class Telemetry(Sink):
    """Tells every sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = list(sinks)

    def started(self, about: Mapping[str, object]) -> None:
        for sink in self.sinks:
            sink.started(about)

    def stepped(self, record: StepRecord) -> None:
        for sink in self.sinks:
            sink.stepped(record)

    def incident(self, incident: Incident) -> None:
        for sink in self.sinks:
            sink.incident(incident)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        for sink in self.sinks:
            sink.evaluated(metrics, is_best)

    def finished(self, result: FitResult) -> None:
        for sink in self.sinks:
            sink.finished(result)
