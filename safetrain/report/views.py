"""The fields of an incident that the template shows."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.causes import CAUSES
from ..core.files import read_text
from ..core.incident import CONSEQUENCE, Incident
from ..core.text import printable
from ..incidents.render import as_typed, caller_lines, headline, replayed, source_lines
from .histogram import histogram, is_drawable
from .incidents import label_of, place_of
from .rewriting import rewritten
from .verdict import capitalised

MAX_PLOTS = 3
MAX_TEXT = 4000
"""Sentences and source lines are truncated to this number of characters."""
TONES = {"commit": "good", "skip": "warn", "rollback": "bad", "stop": "bad", "none": "warn"}
SHORT = {"commit": "repaired", "skip": "skipped", "rollback": "rolled back", "stop": "stopped", "none": "examined"}
_NUMBERED = re.compile(r"^([> ]) +(\d+)(?:  (.*))?$")
_EXPRESSION = re.compile(r": use ([^:]*\bsafetrain\.safe\.[^:]*?) there\b")


@dataclass(frozen=True)
class SourceLine:
    number: int
    text: str
    is_blamed: bool


@dataclass(frozen=True)
class Stop:
    """A module on the path of the bad value."""

    module: str
    phase: str


@dataclass(frozen=True)
class IncidentView:
    incident: Incident
    number: int
    anchor: str
    replay: str
    """The command, empty if the step was not saved."""
    listing: list[SourceLine]
    caller: list[SourceLine]
    """The line of the user's own code that called the library, in its context; empty when no library is involved."""
    plots: list[tuple[str, str]]
    """(operand, its histogram as SVG)"""
    again: int = 0
    """The number of an earlier incident at the same place, or 0."""

    @property
    def tone(self) -> str:
        return TONES.get(self.incident.decision.action, "bad")

    @property
    def outcome(self) -> str:
        return SHORT.get(self.incident.decision.action, self.incident.decision.action)

    @property
    def consequence(self) -> str:
        return CONSEQUENCE.get(self.incident.decision.action, self.incident.decision.action)

    @property
    def place(self) -> str:
        return place_of(self.incident.origin)

    @property
    def address(self) -> str:
        """File and line, relative if it is below the current directory."""
        library = f"{self.incident.origin.library}: " if self.incident.origin.library else ""
        return f"{library}{as_typed(self.incident.origin.file or '')}:{self.incident.origin.line}"

    @property
    def caller_address(self) -> str:
        caller = self.incident.origin.called_from
        return "" if caller is None else f"{as_typed(caller.file)}:{caller.line}, in {caller.function}"

    @property
    def title(self) -> str:
        """What is bad and where, as a heading."""
        origin = self.incident.origin
        at = f" at {self.place}" if self.place else ""
        if origin.phase == "data":
            return f"The batch itself is bad{f', first used{at}' if at else ''}"
        if origin.phase == "params":
            return f"{origin.name or 'A tensor'} of {origin.module or 'the model'} was bad before the step"
        if origin.phase == "unknown":
            return capitalised(shortened(next(iter(self.incident.decision.reasons), "The step was refused"), 200))
        what = f"{'The derivative of ' if origin.phase == 'backward' else ''}{origin.name or origin.op}"
        return f"{what}{at or f' in {origin.module}'}"

    @property
    def time(self) -> str:
        """`2026-01-31 12:00:00 UTC`."""
        return self.incident.time.replace("T", " ").replace("+00:00", " UTC")

    @property
    def label(self) -> str:
        return label_of(self.incident)

    @property
    def meaning(self) -> str:
        """The cause in plain words."""
        cause = CAUSES.get(self.incident.cause.label)
        return "" if cause is None else cause.meaning

    @property
    def operation(self) -> str:
        return printable(headline(self.incident))

    @property
    def why(self) -> str:
        return shortened(self.incident.cause.explanation)

    @property
    def expression(self) -> str:
        """The code to write, if the fix contains any: the rewritten line where possible, else the call."""
        found = _EXPRESSION.search(self.incident.fix)
        if found is None:
            return ""
        origin = self.incident.origin
        # safe.pow helps where the power is undefined, not where the gradient of a masked branch is NaN.
        is_apt = origin.name != "pow" or self.incident.cause.label != "masked_branch_gradient"
        line = (rewritten(origin.code or "", origin.name or "") if is_apt else "") or found[1].replace(
            "safetrain.safe.", "safe."
        )
        return f"{'import math' + chr(10) if 'math.' in line else ''}from safetrain import safe\n\n{line}"

    @property
    def advice(self) -> str:
        """The fix without its verification, which is shown separately."""
        return capitalised(shortened(self.incident.fix.partition(" Verified:")[0]))

    @property
    def proof(self) -> str:
        """How the fix was verified, empty if no remedy helped."""
        verified = self.incident.fix.partition(" Verified:")[2].strip()
        if verified:
            return shortened(verified)
        worked = next((remedy for remedy in self.incident.remedies if remedy.finite), None)
        return f"{shortened(worked.detail or worked.name)}: the step is finite" if worked else ""

    @property
    def path(self) -> list[Stop]:
        stops = []
        for stop in self.incident.propagation[:40]:
            found = re.fullmatch(r"(.*) \((forward|backward)\)", stop, re.DOTALL)
            stops.append(Stop(found[1], found[2]) if found else Stop(stop, ""))
        names = {"<loss>": "the loss function", "<data>": "the batch"}
        return [Stop(names.get(stop.module, shortened(stop.module, 200)), stop.phase) for stop in stops]

    @property
    def operands(self) -> list[dict[str, Any]]:
        inputs = [{"role": "input", **operand} for operand in self.incident.origin.inputs[:12]]
        return [*inputs, *({"role": "output", **operand} for operand in self.incident.origin.outputs[:4])]

    @property
    def shows_bad(self) -> bool:
        """Whether the histograms show values at which the result is bad."""
        shown = self.incident.origin.inputs
        histograms = [operand.get("histogram") or {} for operand in shown]
        return any(operand.get(key) for operand in shown for key in ("nan", "inf", "neg_inf")) or any(
            found.get("zeros_at_bad") or any(found.get("at_bad") or ()) for found in histograms
        )

    @property
    def replayed(self) -> str:
        return replayed(self.incident)


def view_of(
    incident: Incident, number: int, run_dir: Path, prefix: str = "", again: int = 0, with_plots: bool = True
) -> IncidentView:
    """`prefix` makes the anchors of two compared runs unique; `again` is an earlier incident at the same place."""
    anchor = f"incident-{prefix}{number}"
    bundle = run_dir / "incidents" / incident.id
    command = f"safetrain replay {shlex.quote(str(bundle))}" if (bundle / "replay.pt").is_file() else ""
    drawable = [operand for operand in incident.origin.inputs if with_plots and is_drawable(operand)]
    plots = [
        (operand["name"], histogram(operand, f"{anchor}-{index}")) for index, operand in enumerate(drawable[:MAX_PLOTS])
    ]
    return IncidentView(
        incident,
        number,
        anchor,
        command,
        _listing(incident, bundle),
        _numbered(caller_lines(incident, context=2)[1:]),
        plots,
        again,
    )


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    text = printable(text)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _listing(incident: Incident, bundle: Path) -> list[SourceLine]:
    """The source as saved with the incident; else from the file, if the line has not changed."""
    lines = _kept_listing(bundle / "report.md", incident.origin.line) or source_lines(incident, context=4)[1:]
    return _numbered(lines)


def _numbered(lines: list[str]) -> list[SourceLine]:
    found = [_NUMBERED.match(line) for line in lines]
    return [SourceLine(int(line[2]), shortened(line[3] or "", 400), line[1] == ">") for line in found if line]


def _kept_listing(report: Path, line: int | None) -> list[str]:
    try:
        text = read_text(report)
    except (OSError, ValueError):
        return []
    found = re.search(r"^## First bad operation$.*?^(`{3,})python$\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE)
    lines = found[2].splitlines() if found else []
    is_this = any((match := _NUMBERED.match(each)) and match[1] == ">" and int(match[2]) == line for each in lines)
    return lines if is_this else []
