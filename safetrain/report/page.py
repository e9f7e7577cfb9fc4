"""Renders a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..core.files import write_text
from ..core.incident import Incident
from ..core.numbers import typographic
from ..errors import RunDirectoryError, UsageError
from .run import RunHistory, read_run
from .settings import Difference, differences
from .timeline import NARROW, WIDE, timeline
from .verdict import Figure, RunVerdict, figures, verdict
from .views import SHORT, TONES, IncidentView, view_of

if TYPE_CHECKING:
    from jinja2 import Environment

REPORT = "report.html"
MAX_CONFIG = 100_000
MAX_SAMPLES = 300
"""Quarantined samples that are listed."""


@dataclass
class RunView:
    """What the template needs of a run."""

    run: RunHistory
    letter: str
    """`a` or `b` when two are compared."""

    @property
    def name(self) -> str:
        """In a comparison the directory, because two runs of one config have the same name."""
        return self.run.directory.resolve().name if self.letter else self.run.name

    @cached_property
    def verdict(self) -> RunVerdict:
        return verdict(self.run)

    @cached_property
    def figures(self) -> list[Figure]:
        return figures(self.run)

    @cached_property
    def incidents(self) -> list[IncidentView]:
        first: dict[tuple[Any, ...], int] = {}
        views = []
        for index, incident in sorted(self.run.incidents.whole.items()):
            origin = incident.origin
            place = (origin.file, origin.line, origin.op, origin.module, incident.trigger.guard)
            number = self.run.incidents.rows[index].number
            earlier = first.setdefault(place, number)
            views.append(
                view_of(incident, number, self.run.directory, self.letter, earlier if earlier != number else 0)
            )
        return views

    @cached_property
    def anchors(self) -> dict[int, str]:
        """Of the incidents that are shown in full, by their number."""
        return {view.number: view.anchor for view in self.incidents}

    @property
    def num_not_listed(self) -> int:
        return self.run.incidents.count - len(self.run.incidents.rows)

    @property
    def num_rollbacks_not_listed(self) -> int:
        return self.run.num_rollbacks - len(self.run.rollbacks[:30])

    @property
    def config(self) -> str:
        return self.run.config[:MAX_CONFIG]

    @property
    def facts(self) -> list[tuple[str, str]]:
        about = self.run.about
        parameters = about.get("parameters")
        guards = about.get("guards")
        pairs = [
            ("directory", str(self.run.directory)),
            ("parameters", f"{parameters:,}" if isinstance(parameters, int) else ""),
            ("device", str(about.get("device", ""))),
            ("precision", str(about.get("precision", ""))),
            ("processes", str(about.get("world_size", ""))),
            ("guards", ", ".join(map(str, guards)) if isinstance(guards, list) else ""),
        ]
        return [(label, value) for label, value in pairs if value]

    @property
    def changes(self) -> list[tuple[str, str]]:
        """What recovery changed until the end of the run, and how to make it permanent."""
        end = self.run.end
        islands, patches, quarantined = end.get("islands"), end.get("patches"), end.get("quarantined")
        found = []
        if isinstance(islands, dict) and islands.get("yaml"):
            found.append(("Modules kept in float32. To make it permanent, add to the config:", str(islands["yaml"])))
        for patch in patches if isinstance(patches, list) else []:
            if isinstance(patch, dict):
                place = f"{str(patch.get('file')).rpartition('/')[2]}:{patch.get('line')}"
                text = f"{place} ran as its safe variant. To make it permanent: {patch.get('fix')}"
                found.append((text, str(patch.get("code"))))
        if isinstance(quarantined, list) and quarantined:
            more = f", … {len(quarantined) - MAX_SAMPLES:,} more" if len(quarantined) > MAX_SAMPLES else ""
            text = "Samples that were excluded because they repeatedly caused incidents:"
            found.append((text, ", ".join(map(str, quarantined[:MAX_SAMPLES])) + more))
        return [(text, code.rstrip()) for text, code in found]


@dataclass(frozen=True)
class Written:
    path: Path
    num_bytes: int
    verdicts: list[RunVerdict]
    num_incidents: int


def write_report(run_dir: str | Path, out: str | Path | None = None, compare: str | Path | None = None) -> Written:
    """Write the report of a run, or of two side by side; by default to `report.html` in the directory of the first."""
    environment = _environment()
    runs = [read_run(directory) for directory in ([run_dir] if compare is None else [run_dir, compare])]
    path = _path(runs[0], out, compare is not None)
    views = [RunView(run, letter if compare is not None else "") for run, letter in zip(runs, "ab", strict=False)]
    text = render(views, environment)
    try:
        write_text(path, text)
    except OSError as error:
        raise RunDirectoryError(
            f"the report cannot be written to {path}: {error.strerror or error}.\nTo fix: give another place with --out FILE."
        ) from error
    count = sum(run.incidents.count for run in runs)
    return Written(path, len(text.encode()), [view.verdict for view in views], count)


def _path(run: RunHistory, out: str | Path | None, is_comparison: bool) -> Path:
    name = "comparison.html" if is_comparison else REPORT
    if out is None:
        return run.directory / name
    path = Path(out)
    return path / name if path.is_dir() else path


def write_incident_page(directory: Path, incident: Incident) -> None:
    """`report.html` in the directory of an incident, written during training: without plots, which would take a second."""
    found = view_of(incident, 1, directory.parent.parent, with_plots=False)
    write_text(directory / REPORT, _render(_environment(), "one_incident.html.jinja", found=found))


def render(views: Sequence[RunView], environment: Environment | None = None) -> str:
    runs = [view.run for view in views]
    has_steps = any(run.last_step >= 0 for run in runs)
    differing: list[Difference] = differences(runs[0], runs[1]) if len(runs) > 1 else []
    return _render(
        environment or _environment(),
        "report.html.jinja",
        views=views,
        is_comparison=len(views) > 1,
        wide=timeline(runs, WIDE, "wide") if has_steps else "",
        narrow=timeline(runs, NARROW, "narrow") if has_steps else "",
        compared=_compared(views) if len(views) > 1 else [],
        differences=differing,
    )


def _render(environment: Environment, template: str, **content: Any) -> str:
    script = _resource("report.js")
    text = environment.get_template(template).render(
        content,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_resource("report.css"),
        version=__version__,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    # Names and messages of others: what a terminal acts on, or what turns the order of text around, is shown as an escape.
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _compared(views: Sequence[RunView]) -> list[tuple[str, Figure | None, Figure | None]]:
    """The numbers of both runs, a row for each."""
    first, second = ({figure.label: figure for figure in view.figures} for view in views)
    return [(label, first.get(label), second.get(label)) for label in dict.fromkeys([*first, *second])]


def _resource(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    try:
        import jinja2
    except ImportError as error:
        raise UsageError(
            f"a report needs jinja2, which cannot be imported ({error}).\n"
            "To fix: pip install jinja2, or pip install --upgrade --force-reinstall safetrain."
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = typographic
    environment.filters["operand"] = _operand
    environment.globals.update(tones=TONES, shorts=SHORT)
    return environment


def _operand(value: Any) -> str:
    """A cell in the table of operands."""
    if isinstance(value, list):
        return " × ".join(map(str, value)) or "scalar"
    if isinstance(value, float) and abs(value) < 1e6 and value.is_integer():
        return f"{value:g}".replace("-", "−")
    return typographic(value)
