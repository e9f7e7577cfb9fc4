"""An incident: a step that was refused, with its evidence. The fields are those of `incident.json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import plain

SCHEMA = 1


@dataclass
class Trigger:
    guard: str
    signal: str
    value: Any


@dataclass
class Outcome:
    action: str
    reasons: list[str]


@dataclass
class Origin:
    """The first bad operation. Empty fields were not found out; `phase` is then `unknown`."""

    phase: str = "unknown"
    op: str | None = None
    name: str | None = None
    module: str | None = None
    module_type: str | None = None
    file: str | None = None
    line: int | None = None
    code: str | None = None
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Cause:
    label: str = "unknown"
    explanation: str = "the step was not investigated"


@dataclass
class Remedy:
    name: str
    finite: bool
    loss: float | None = None
    detail: str = ""


@dataclass
class Replay:
    reproduced: bool | None = None
    deterministic: bool | None = None


@dataclass
class Incident:
    step: int
    """Index of the attempted step, from 0: `result.losses[step]` is its loss."""
    time: str
    trigger: Trigger
    decision: Outcome
    rank: int = 0
    origin: Origin = field(default_factory=Origin)
    cause: Cause = field(default_factory=Cause)
    samples: list[int] = field(default_factory=list)
    propagation: list[str] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    fix: str = ""
    replay: Replay = field(default_factory=Replay)
    schema: int = SCHEMA
    path: str | None = None
    """Directory of the bundle on disk, relative to the run directory; None when none was written."""

    @property
    def id(self) -> str:
        return f"step-{self.step:06d}"

    def to_dict(self) -> dict[str, Any]:
        """As in `incident.json`: JSON types only, non-finite numbers as strings."""
        fields = dataclasses.asdict(self)
        del fields["path"]
        result: dict[str, Any] = plain({"schema": fields.pop("schema"), "id": self.id, **fields})
        return result

    def headline(self) -> str:
        return f"{self.decision.action} at step {self.step}: {'; '.join(self.decision.reasons)}"

    def render(self, run_dir: str | Path | None = None) -> str:
        """A short block for a terminal. With the run's directory it ends in the command that replays the step."""
        from .incident_report import compact, paragraph, row

        signal = f", {self.trigger.signal} = {_short(self.trigger.value)}" if self.trigger.signal else ""
        lines = [
            f"INCIDENT at step {self.step}{signal}: {CONSEQUENCE[self.decision.action]}",
            *paragraph("CAUGHT BY", "; ".join(self.decision.reasons) or self.trigger.guard, max_lines=3),
        ]
        kept = (
            ""
            if self.path is None
            else f"safetrain replay {self.path if run_dir is None else f'{run_dir}/{self.path}'}"
        )
        if self.was_investigated:
            return "\n".join([*lines, *compact(self, kept)])
        return "\n".join([*lines, row("REPLAY", kept)] if kept else lines)

    @property
    def was_investigated(self) -> bool:
        return self.origin.phase != "unknown" or bool(self.remedies or self.fix)


CONSEQUENCE = {
    "none": "only examined, nothing was done",
    "commit": "step repaired and committed",
    "skip": "step refused, nothing of it was applied; training goes on",
    "rollback": "step refused, and the training state rolled back",
    "stop": "step refused, nothing of it was applied; the run is stopped",
}


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
