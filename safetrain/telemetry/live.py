"""Live progress at the bottom of a terminal, with everything else scrolling above it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ..core import numbers
from ..core.progress import shown_by
from ..core.result import FitResult
from .console import Console, health_text, left_text, lr_text
from .sink import StepRecord
from .vitals import HEALTHY, RECOVERING, Vitals

WIDE = 150
"""Columns from which everything fits into one line."""
REDRAW_SECONDS = 0.5
"""Drawing takes a millisecond or two, so it is done twice a second."""
GAP = "  "
JOINED = "+"
"""Begins the style of a cell that follows the one before it without a gap."""
Cell = tuple[str, str]
"""Text and style."""


class LiveConsole(Console):
    """Draws when there is something new, a few times a second, and never from a thread: that would slow the training down."""

    def __init__(self, log_every: int) -> None:
        super().__init__(log_every, is_terminal=True)
        self._line = ProgressLine()
        self._open = ExitStack()
        self._live: Live | None = None
        self._drawn_at = 0.0

    def started(self, about: Mapping[str, Any]) -> None:
        super().started(about)
        live = Live(self._line, console=self._out, auto_refresh=False, transient=True)
        with contextlib.suppress(Exception):  # another one is active: this run then has none
            self._live = self._open.enter_context(live)
            self._open.enter_context(shown_by(self._progressed))

    def _draw_if_due(self) -> None:
        if perf_counter() - self._drawn_at >= REDRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = perf_counter()
        if self._live is not None:
            self._live.refresh()

    def logged(self, record: StepRecord, vitals: Vitals) -> None:
        if self._live is None:
            super().logged(record, vitals)

    def refreshed(self, vitals: Vitals) -> None:
        self._line.vitals = vitals
        self._draw_if_due()

    def doing(self, what: str | None) -> None:
        self._line.doing, self._line.part = what, ""
        self._draw()

    def _progressed(self, what: str, done: int, total: int | None) -> None:
        self._line.part = f"{what} {numbers.of_total(done, total)}"
        self._draw_if_due()

    def finished(self, result: FitResult) -> None:
        self._live = None
        self._open.close()
        super().finished(result)


class ProgressLine:
    """Position and health of the run: one line on a wide terminal, two or three on a narrow one."""

    def __init__(self) -> None:
        self.vitals: Vitals | None = None
        self.doing: str | None = None
        self.part = ""
        """Progress of what it is doing."""

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width, vitals = options.max_width, self.vitals
        if vitals is None or vitals.last is None:
            yield _line([(self._doing("starting"), "dim")], width)
            return
        where, speed, numbers = _where(vitals), _speed(vitals), self._numbers(vitals)
        if width >= WIDE:
            yield _line(_with_bar(where, [*speed, *numbers], vitals, width, options.ascii_only), width)
            return
        yield _line(_with_bar(where, speed, vitals, width, options.ascii_only), width)
        for cells in _flowing(numbers, width):
            yield _line(cells, width)

    def _numbers(self, vitals: Vitals) -> list[Cell]:
        record = vitals.last
        assert record is not None
        style = "bold red" if not record.is_ordinary else ""
        if self.doing is not None:
            health = (self._doing(""), "bold magenta")
        else:
            colour = {HEALTHY: "green", RECOVERING: "yellow"}.get(vitals.status, "bold red")
            health = (health_text(vitals), colour)
        return [
            (f"loss {record.loss:.5g}", style),
            (f"grad {record.view.grad_norm:.3g}", style),
            (f"lr {lr_text(record)}", "yellow" if record.decision.lr_scale != 1.0 else ""),
            health,
        ]

    def _doing(self, otherwise: str) -> str:
        doing = self.doing or otherwise
        return f"{doing}: {self.part}" if self.part else doing


def _where(vitals: Vitals) -> list[Cell]:
    record = vitals.last
    assert record is not None
    return [
        (f"epoch {record.view.epoch}", ""),
        (f"step {numbers.of_total(record.num_committed, vitals.total_steps)}", "bold"),
    ]


def _speed(vitals: Vitals) -> list[Cell]:
    return [(text, "") for text in (numbers.rate(vitals.steps_per_second), left_text(vitals)) if text]


def _with_bar(before: list[Cell], after: list[Cell], vitals: Vitals, width: int, ascii_only: bool) -> list[Cell]:
    """The cells with a progress bar in the space between them, if the length of the run is known."""
    if not vitals.total_steps or vitals.last is None:
        return [*before, *after]
    share = min(vitals.last.num_committed / vitals.total_steps, 1.0)
    percent = f"{100 * share:3.0f}%"
    room = min(width - _length([*before, (percent, ""), *after]) - len(GAP), 40)
    if room < 4:
        return [*before, (percent, ""), *after]
    done = round(room * share)
    full, rest = ("#", "-") if ascii_only else ("━", "─")
    return [*before, (full * done, "cyan"), (rest * (room - done), JOINED + "bright_black"), (percent, ""), *after]


def _flowing(cells: list[Cell], width: int) -> list[list[Cell]]:
    """The cells, wrapped into lines."""
    lines: list[list[Cell]] = [[]]
    for cell in cells:
        if lines[-1] and _length([*lines[-1], cell]) > width:
            lines.append([])
        lines[-1].append(cell)
    return lines


def _length(cells: list[Cell]) -> int:
    return sum(len(text) for text, _ in cells) + len(GAP) * (len(cells) - 1)


def _line(cells: list[Cell], width: int) -> Text:
    parts: list[Cell] = []
    for text, style in cells:
        if parts and not style.startswith(JOINED):
            parts.append((GAP, ""))
        parts.append((text, style.removeprefix(JOINED)))
    line = Text.assemble(*parts, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line
