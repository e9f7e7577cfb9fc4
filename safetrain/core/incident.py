"""An incident: a step that was refused, with its evidence. The fields are those of `incident.json`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .files import as_number, plain
from .numbers import amount, exact
from .verdict import Action, Decision
from .view import StepView

SCHEMA = 1
STATE_AUDIT = "audit"
"""What stands for the guard in an incident of the state itself."""


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
class CalledFrom:
    """The innermost line of the user's own code, when the operation itself is in a library."""

    file: str
    line: int
    code: str
    function: str


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
    library: str | None = None
    """Name and version of the installed package that `file` belongs to; None when it is the user's own."""
    called_from: CalledFrom | None = None
    """From where the user's own code called the library; None when `file` is the user's own."""
    frames: list[dict[str, Any]] = field(default_factory=list)
    """The calls from the user's line down to the operation, torch's own Python included; empty when there is only one."""


def describe_operand(operand: dict[str, Any]) -> str:
    """`self: 12 zeros, 3 negative of 4096 values in [-1, 2], smallest magnitude 3e-39`."""
    if "count" not in operand:
        bounds = f" in [{operand['min']}, {operand['max']}]" if "min" in operand else ""
        return f"{operand['name']}: {operand['dtype']} {operand['shape']}{bounds}"
    words = (("zeros", "zero"), ("negatives", "negative"), ("nan", "NaN"), ("inf", "+inf"), ("neg_inf", "-inf"))
    special = ", ".join(f"{operand[key]} {word}" for key, word in words if operand[key])
    text = f"{operand['name']}: {special + ' of ' if special else ''}{operand['count']} values"
    if "min" in operand:
        text += f" in [{operand['min']:.4g}, {operand['max']:.4g}]"
    smallest = operand.get("smallest", math.inf)
    return text + (f", smallest magnitude {amount(smallest)}" if smallest < 1e-6 else "")


@dataclass
class Cause:
    label: str = "unknown"
    explanation: str = "the step was not investigated"


@dataclass
class Link:
    """One place on the way of the fatal value, from the bad operand back to where it came from."""

    kind: str
    """`operation` on the way; at its end `data`, `parameter`, `buffer`, `constant`, `random`, `cancellation`, `rounding` or
    `unknown`."""
    name: str
    """Of the operation, the batch field or the parameter."""
    index: str = ""
    """Which elements: `[4, :]`."""
    value: str = ""
    text: str = ""
    """All of it in words."""
    file: str | None = None
    line: int | None = None
    code: str | None = None
    rows: list[int] = field(default_factory=list)
    """Of data: which samples of the batch."""


@dataclass
class Remedy:
    name: str
    finite: bool
    loss: float | None = None
    detail: str = ""


@dataclass
class Replay:
    reproduced: bool | None = None
    """The replay went bad in the same way: a loss of the same kind (NaN, infinite, or about the same number), with the same operation to
    blame in each replay. None: there was nothing to compare with."""
    deterministic: bool | None = None
    """Two replays gave the same loss bit for bit. Sums in no fixed order, as GPUs make them, do not."""
    bitwise: bool | None = None
    """The replay gave the loss of the step bit for bit."""


@dataclass
class Incident:
    """A refused step: what caught it, what was done, and what its replay has found out.

    >>> data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
    >>> data[7][0][2] = float("inf")
    >>> result = SafeTrainer(torch.nn.Linear(3, 1), loss_fn=torch.nn.MSELoss(), train_data=data, config=QUIET).fit()
    >>> incident = result.incidents[0]
    >>> incident.step, incident.trigger.guard, incident.cause.label, incident.samples, incident.decision.action
    (7, 'finite', 'bad_input_data', [2], 'commit')
    """

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
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """With several processes: what each rank reports of its part of the step. `rank` is the one at fault."""
    lineage: list[Link] = field(default_factory=list)
    """Where the fatal value came from: the bad operand first, then what it was made of, back to data, a parameter or a constant."""

    @property
    def id(self) -> str:
        return f"step-{self.step:06d}"

    def to_dict(self) -> dict[str, Any]:
        """As in `incident.json`: JSON types only, non-finite numbers as strings."""
        fields = dataclasses.asdict(self)
        del fields["path"]
        if not self.ranks:
            del fields["ranks"]
        result: dict[str, Any] = plain({"schema": fields.pop("schema"), "id": self.id, **fields})
        return result

    def headline(self) -> str:
        return f"{self.decision.action} at step {self.step}: {'; '.join(self.decision.reasons)}"

    def render(self, run_dir: str | Path | None = None, is_repeated: bool = False) -> str:
        """A short block for a terminal. With the run's directory it ends in the command that replays the step.

        `is_repeated`: the same operation was explained before, so the block is shorter.
        """
        from ..incidents.render import compact, paragraph, row

        signal = f", {self.trigger.signal} = {exact(self.trigger.value)}" if self.trigger.signal else ""
        consequence = CONSEQUENCE_FOR_STATE if self.is_of_state else CONSEQUENCE
        lines = [
            f"INCIDENT at step {self.step}{signal}: {consequence[self.decision.action]}",
            *paragraph("CAUGHT BY", "; ".join(self.decision.reasons) or self.trigger.guard, max_lines=3),
        ]
        place = self.path if run_dir is None else f"{run_dir}/{self.path}"
        kept = f"safetrain replay {place}" if self.path is not None else ""
        if self.was_investigated:
            return "\n".join([*lines, *compact(self, kept, is_repeated)])
        label = f"{self.cause.label}: " if self.cause.label != "unknown" else ""
        why = paragraph("WHY", f"{label}{self.cause.explanation}", max_lines=3)
        return "\n".join([*lines, *why, *([row("REPLAY", kept)] if kept else [])])

    @property
    def is_of_state(self) -> bool:
        """The state was found to be bad between two steps; no step was refused."""
        return self.trigger.guard == STATE_AUDIT

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
CONSEQUENCE_FOR_STATE = {
    "rollback": "the state after this step is bad; rolled back to a good one",
    "stop": "the state after this step is bad and was not saved; the run is stopped",
}


def incident_of(view: StepView, decision: Decision, rank: int = 0) -> Incident:
    """An incident with what is known at once: who refused the step, and why."""
    guard, verdict = next(
        ((g, v) for g, v in decision.by_severity() if v.action > Action.COMMIT and "signal" in v.evidence),
        decision.decisive,
    )
    trigger = Trigger(guard, str(verdict.evidence.get("signal", "")), verdict.evidence.get("value"))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Incident(view.step, now, trigger, Outcome(str(decision.action), decision.reasons), rank=rank)


def restore_numbers(incident: Incident) -> None:
    """Of an incident that was read from JSON: non-finite numbers were strings there."""
    incident.trigger.value = as_number(incident.trigger.value)
    for remedy in incident.remedies:
        remedy.loss = as_number(remedy.loss)
    for operand in (*incident.origin.inputs, *incident.origin.outputs):
        operand.update({key: as_number(operand[key]) for key in ("min", "max", "smallest") if key in operand})
