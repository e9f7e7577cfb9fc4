"""The incidents of a run, from its journal and from the bundles on disk."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..core.files import read_text
from ..core.incident import CalledFrom, Cause, Incident, Link, Origin, Outcome, Remedy, Replay, Trigger, restore_numbers

MAX_WHOLE = 60
"""Incidents that are shown in full: the first ones, the first one at every further place, and the last."""
MAX_PLACES = 120
MAX_ROWS = 1000
"""Incidents that get a row in the table."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class Row:
    """A row of the table of incidents; kept also of incidents that are not shown in full."""

    number: int
    """From 1, in the order of steps."""
    step: int
    label: str
    """The cause, or the guard that refused the step if there is no known cause."""
    action: str
    place: str
    operation: str
    num_samples: int
    rank: int


class IncidentList:
    def __init__(self) -> None:
        self.count = 0
        self.rows: list[Row] = []
        """Sorted by step, at most `MAX_ROWS`."""
        self.whole: dict[int, Incident] = {}
        """By their position in `rows`."""
        self.last: Incident | None = None
        self.by_cause: Counter[tuple[str, str]] = Counter()
        """By cause and place."""
        self.actions: Counter[str] = Counter()
        self._steps: set[int] = set()

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, found: dict[str, Any]) -> None:
        """Adds an incident from its JSON fields. Raises ValueError, TypeError or KeyError if they are malformed."""
        incident = incident_from(found)
        row = _row(incident, self.count + 1)
        self.count += 1
        if self.last is None or incident.step >= self.last.step:
            self.last = incident
        self.actions[row.action] += 1
        key = (row.label, row.place)
        is_new_place = key not in self.by_cause
        if is_new_place and len(self.by_cause) >= MAX_ROWS:
            key = ("others", "")
        self.by_cause[key] += 1
        if len(self.rows) >= MAX_ROWS:
            return
        self._steps.add(row.step)
        self.rows.append(row)
        if len(self.whole) < MAX_WHOLE or (is_new_place and len(self.whole) < MAX_PLACES):
            self.whole[len(self.rows) - 1] = incident

    def add_bundles(self, run_dir: Path, problems: list[str]) -> None:
        """Adds incidents that are on disk but not in the journal, which may be missing or truncated."""
        directories = sorted(path.parent for path in (run_dir / "incidents").glob("step-*/incident.json"))
        missing = []
        for directory in directories[: 2 * MAX_ROWS]:
            try:
                found = json.loads(read_text(directory / "incident.json"))
                if self.count <= MAX_ROWS and int(found["step"]) not in self._steps:
                    self.add(found)
                    missing.append(int(found["step"]))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                problems.append(f"incidents/{directory.name}/incident.json cannot be read: {error}")
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            problems.append(
                f"the incident of step {shown} is on disk but not in the journal: the process ended before it was logged, or the "
                "run was resumed from an earlier step"
            )
            order = sorted(range(len(self.rows)), key=lambda index: self.rows[index].step)
            self.whole = {new: self.whole[old] for new, old in enumerate(order) if old in self.whole}
            self.rows = [replace(self.rows[old], number=new + 1) for new, old in enumerate(order)]

    def finish(self) -> None:
        """Makes sure that the last incident, which a stopped run ended with, is shown in full."""
        if self.last is None:
            return
        if self.rows[-1].step != self.last.step:
            self.rows.append(_row(self.last, self.count))
        self.whole.setdefault(len(self.rows) - 1, self.last)


def _row(incident: Incident, number: int) -> Row:
    origin = incident.origin
    return Row(
        number,
        incident.step,
        label_of(incident),
        incident.decision.action,
        place_of(origin),
        origin.name or origin.op or "",
        len(incident.samples),
        incident.rank,
    )


def label_of(incident: Incident) -> str:
    return incident.cause.label if incident.cause.label != "unknown" else incident.trigger.guard or "unknown"


def place_of(origin: Origin) -> str:
    """`file.py:12`, without directories."""
    if not origin.file or origin.line is None:
        return ""
    return f"{origin.file.replace(chr(92), '/').rpartition('/')[2]}:{origin.line}"


def incident_from(found: dict[str, Any]) -> Incident:
    """An incident from its JSON fields; ignores unknown fields and fills in missing ones, so that other versions can be read."""
    incident = Incident(
        step_number(found["step"]),
        str(found.get("time", "")),
        _part(Trigger("", "", None), found.get("trigger")),
        _part(Outcome("", []), found.get("decision")),
        int(found.get("rank") or 0),
        _part(Origin(), found.get("origin")),
        _part(Cause(), found.get("cause")),
        [int(sample) for sample in found.get("samples") or []],
        [str(stop) for stop in found.get("propagation") or []],
        [_part(Remedy("", False), remedy) for remedy in found.get("remedies") or []],
        str(found.get("fix") or ""),
        _part(Replay(), found.get("replay")),
        lineage=[_part(Link("", ""), link) for link in found.get("lineage") or []],
    )
    restore_numbers(incident)
    incident.decision.reasons = [str(reason) for reason in incident.decision.reasons or []]
    origin = incident.origin
    origin.line = None if origin.line is None else int(origin.line)
    for name in ("phase", "op", "name", "module", "module_type", "file", "code"):
        if (value := getattr(origin, name)) is not None:
            setattr(origin, name, str(value))
    origin.called_from = _called_from((found.get("origin") or {}).get("called_from"))
    for operand in (*origin.inputs, *origin.outputs):
        operand["name"] = str(operand.get("name", ""))
    return incident


def _called_from(found: Any) -> CalledFrom | None:
    if not isinstance(found, dict) or not isinstance(found.get("line"), int):
        return None
    return CalledFrom(
        str(found.get("file")), found["line"], str(found.get("code") or ""), str(found.get("function") or "")
    )


def _part(part: Part, found: dict[str, Any] | None) -> Part:
    """Sets the fields that are present and known."""
    for known in fields(part):  # type: ignore[arg-type]
        if found and known.name in found:
            setattr(part, known.name, found[known.name])
    return part


def step_number(value: Any) -> int:
    """`value` as a step number; raises ValueError if it cannot be one."""
    step = int(value)
    if not 0 <= step < 2**53:
        raise ValueError(f"{value!r} is not a step")
    return step
