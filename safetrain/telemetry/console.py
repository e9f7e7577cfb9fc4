"""Progress, incidents and a summary for people. Live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from ..core import numbers
from ..core.incident import Incident
from ..core.result import FitResult
from ..core.text import printable, prints_to_terminal
from ..incidents.render import LABEL, as_typed, paragraph, row
from . import summary
from .sink import Sink, StepRecord
from .vitals import STATUS, Vitals

STYLES = {"commit": "yellow", "skip": "yellow"}
"""Styles of incidents that training survives without a rollback; the others are red."""


class _Output(RichConsole):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process


def open_output(is_terminal: bool) -> RichConsole:
    """Standard output. Without a terminal no control code is written, whatever the environment says."""
    return _Output(
        file=sys.stdout, highlight=False, soft_wrap=True, force_terminal=is_terminal, no_color=not is_terminal or None
    )


def is_watched() -> bool:
    """Standard output is a terminal that can draw."""
    return prints_to_terminal() and not RichConsole().is_dumb_terminal


class Console(Sink):
    """One line per `loop.log_every` steps (None: no such lines), and everything else as it happens."""

    writes_to_output = True

    def __init__(self, log_every: int | None, is_terminal: bool = False) -> None:
        self._out = open_output(is_terminal)
        self._log_every = log_every
        self._run_dir: Path | None = None
        self._explained: set[tuple[Any, ...]] = set()
        """Places in the source whose incidents were already shown in full."""

    def _say(self, text: str | Text, style: str | None = None) -> None:
        encoding = self._out.encoding
        if isinstance(text, str):
            text = Text(text, style or "")
        if not (shown := text.plain).isprintable():  # names and messages of the user's may hold what a terminal acts on
            text.plain = printable(shown)
        if not encoding.lower().startswith("utf"):  # a terminal that only knows ASCII, say
            text.plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        # On a terminal, text without a label wraps at words; commands to copy and output that is not a terminal never wrap.
        if not self._out.is_terminal:
            print(text.plain, file=self._out.file, flush=True)
            return
        is_broken = text.plain[:1].strip() != ""
        self._out.print(text, soft_wrap=not is_broken)

    def started(self, about: Mapping[str, Any]) -> None:
        guards = ", ".join(about["guards"]) or "none"
        head = f"{about['name']}: {about['parameters']:,} parameters on {about['device']}, {about['precision']}"
        self._say(f"{head}; guards: {guards}", "bold")
        if about.get("resumed") is not None:
            self._say(f"resumed: {about['resumed']}", "bold")
        if about["run_dir"] is None:
            return self._say("no run directory: nothing is written")
        self._run_dir = Path(as_typed(str(about["run_dir"])))
        self._say(f"run directory: {self._run_dir}")

    def noted(self, text: str) -> None:
        self._say(f"note: {printable(text)}", "yellow")

    def logged(self, record: StepRecord, vitals: Vitals) -> None:
        if self._log_every is not None and record.view.step % self._log_every == 0:
            self._say("  ".join(step_cells(record, vitals)).rstrip())

    def incident(self, incident: Incident) -> None:
        style = STYLES.get(incident.decision.action, "red")
        origin = incident.origin
        place = origin.file, origin.line, origin.op, incident.cause.label
        for line in incident.render(self._run_dir, place in self._explained).splitlines():
            self._say(coloured(line, style))
        if origin.op is not None:
            self._explained.add(place)

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        self._say(f"rolled back to the state of step {to_step} ({source}); {num_committed} steps committed", "bold red")

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        shown = "  ".join(f"{name} {value:.5g}" for name, value in metrics.items() if name != "step")
        self._say(f"eval at step {int(metrics['step'])}:  {shown}{'  (best)' if is_best else ''}", "cyan")

    def hangs(self, about: Mapping[str, Any]) -> None:
        for line in printable(about["text"]).splitlines():
            self._say(line, "yellow" if about.get("over") else "red")

    def finished(self, result: FitResult) -> None:
        style = {"done": "bold green", "paused": "bold yellow"}.get(result.status, "bold red")
        self._say(summary.headline(result), style)
        for label, text in summary.summary_rows(result):
            for line in [row(label, text)] if text.startswith("  ") else paragraph(label, text):
                self._say(coloured(line, style))
        commands = summary.next_commands(result)
        longest = max((len(command) for command, _ in commands), default=0)
        lines = [f"{command:{longest}}   {purpose}" for command, purpose in commands]
        if self._out.is_terminal and max(map(len, lines), default=0) + LABEL + 2 > self._out.width:
            lines = [command for command, _ in commands]
        for index, line in enumerate(lines):
            self._say(coloured(row("next" if index == 0 else "", line), style))


def step_cells(record: StepRecord, vitals: Vitals) -> list[str]:
    """The cells of the line about a step."""
    view, total = record.view, vitals.total_steps
    of = f"/{total}" if total is not None else ""
    cells = [
        f"epoch {record.view.epoch}",
        f"step {view.step:>{max(6, len(str(total or 0)))}}{of}",
        f"loss {record.loss:<9.5g}",
        f"grad {view.grad_norm:<8.3g}",
        f"lr {lr_text(record):<8}",
        numbers.rate(vitals.steps_per_second),
        left_text(vitals),
        health_text(vitals),
    ]
    return [cell for cell in cells if cell]


def lr_text(record: StepRecord) -> str:
    """The applied learning rate, and its scale if that is not 1."""
    scale = record.decision.lr_scale
    return f"{record.view.lr * scale:.2e}" + (f" (backed off x{scale:.2g})" if scale != 1.0 else "")


def left_text(vitals: Vitals) -> str:
    left = vitals.seconds_left
    return "" if math.isnan(left) else f"{numbers.clock(left)} left"


def health_text(vitals: Vitals) -> str:
    """`healthy`, or what has happened."""
    counts = (
        (vitals.num_repaired, "repaired"),
        (vitals.num_skipped - vitals.num_overflows, "skipped"),
        (vitals.num_rollbacks, "rolled back"),
    )
    happened = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{STATUS[vitals.status]} ({happened})" if happened else STATUS[vitals.status]


def coloured(line: str, style: str) -> Text:
    """A line of a block with its label or title coloured, and the blamed line of the source in bold."""
    if line.lstrip().startswith("> "):
        return Text(line, "bold")
    if line[:1].strip():
        return Text(line, f"bold {style}")
    text = Text(line)
    if line[2:3].strip() and line[LABEL : LABEL + 2] == "  ":
        text.stylize("cyan", 0, LABEL + 2)
    return text
