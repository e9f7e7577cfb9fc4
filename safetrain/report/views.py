"""An incident in the words and pieces that its page shows."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.causes import CAUSES
from ..core.incident import CONSEQUENCE, Incident
from ..incidents.render import headline, printable, replayed, source_lines
from .incidents import label_of, place_of
from .rewriting import rewritten
from .spread import can_be_drawn, spread

MAX_PLOTS = 3
MAX_TEXT = 4000
"""Characters of a sentence or a source line; what is longer is cut."""
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
    """On the way of the bad value."""

    module: str
    phase: str


@dataclass(frozen=True)
class IncidentView:
    incident: Incident
    number: int
    anchor: str
    replay: str
    """The command, empty when the step was not kept."""
    listing: list[SourceLine]
    plots: list[tuple[str, str]]
    """Operand, and its histogram as SVG."""
    again: int = 0
    """The number of an earlier incident at the same place, if there is one."""

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
        """File and line; relative when it lies below the current directory."""
        origin = self.incident.origin
        file = origin.file or ""
        below = os.path.relpath(file) if os.path.isabs(file) else file
        return f"{file if below.startswith('..') else below}:{origin.line}"

    @property
    def title(self) -> str:
        """What is to be looked at, in a few words."""
        origin = self.incident.origin
        at = f" at {self.place}" if self.place else ""
        if origin.phase == "data":
            return f"The batch itself is bad{f', first used{at}' if at else ''}"
        if origin.phase == "params":
            return f"{origin.name or 'A tensor'} of {origin.module or 'the model'} was bad before the step"
        if origin.phase == "unknown":
            return _capital(shortened(next(iter(self.incident.decision.reasons), "The step was refused"), 200))
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
        """What to write there, if the fix names it: the line itself where it can be rewritten, else the call."""
        found = _EXPRESSION.search(self.incident.fix)
        if found is None:
            return ""
        origin = self.incident.origin
        # The safe power helps where the power itself does not exist, not where a masked branch leaks.
        is_apt = origin.name != "pow" or self.incident.cause.label != "masked_branch_gradient"
        line = (rewritten(origin.code or "", origin.name or "") if is_apt else "") or found[1].replace(
            "safetrain.safe.", "safe."
        )
        return f"{'import math' + chr(10) if 'math.' in line else ''}from safetrain import safe\n\n{line}"

    @property
    def advice(self) -> str:
        """The fix without what was verified, which is said beside it."""
        return _capital(shortened(self.incident.fix.partition(" Verified:")[0]))

    @property
    def proof(self) -> str:
        """How the fix was tried, empty when nothing that was tried helped."""
        said = self.incident.fix.partition(" Verified:")[2].strip()
        if said:
            return shortened(said)
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
        """Whether some bars of the histograms are of values at which the result is bad."""
        shown = self.incident.origin.inputs
        spreads = [operand.get("histogram") or {} for operand in shown]
        return any(operand.get(key) for operand in shown for key in ("nan", "inf", "neg_inf")) or any(
            spread.get("zeros_at_bad") or any(spread.get("at_bad") or ()) for spread in spreads
        )

    @property
    def replayed(self) -> str:
        return replayed(self.incident)


def view_of(
    incident: Incident, number: int, run_dir: Path, prefix: str = "", again: int = 0, with_plots: bool = True
) -> IncidentView:
    """`prefix` keeps the anchors of two runs apart; `again` is the number of an earlier incident at the same place."""
    anchor = f"incident-{prefix}{number}"
    bundle = run_dir / "incidents" / incident.id
    command = f"safetrain replay {shlex.quote(str(bundle))}" if (bundle / "replay.pt").is_file() else ""
    drawable = [operand for operand in incident.origin.inputs if with_plots and can_be_drawn(operand)]
    plots = [
        (operand["name"], spread(operand, f"{anchor}-{index}")) for index, operand in enumerate(drawable[:MAX_PLOTS])
    ]
    return IncidentView(incident, number, anchor, command, _listing(incident, bundle), plots, again)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    text = printable(text)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _listing(incident: Incident, bundle: Path) -> list[SourceLine]:
    """As it was when the incident happened, if it was kept; else as the file is now, if the line is still the same."""
    lines = _kept_listing(bundle / "report.md", incident.origin.line) or source_lines(incident, context=4)[1:]
    found = [_NUMBERED.match(line) for line in lines]
    return [SourceLine(int(line[2]), shortened(line[3] or "", 400), line[1] == ">") for line in found if line]


def _kept_listing(report: Path, line: int | None) -> list[str]:
    try:
        text = report.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    found = re.search(r"^## First bad operation$.*?^(`{3,})python$\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE)
    lines = found[2].splitlines() if found else []
    is_this = any((match := _NUMBERED.match(each)) and match[1] == ">" and int(match[2]) == line for each in lines)
    return lines if is_this else []
