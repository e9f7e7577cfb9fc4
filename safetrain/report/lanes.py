"""The rows below the curves: refused steps, rollbacks, resumes and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from . import svg
from .run import RunHistory
from .series import Marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ARROWS = 100


@dataclass(frozen=True)
class Lane:
    title: str
    colour: str
    marks: Marks
    marker: str
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) of each rollback."""
    hollow: Marks = field(default_factory=Marks)
    """Checkpoints that were deleted since."""


def lanes_of(run: RunHistory, letter: str = "", colour: str = "") -> list[Lane]:
    """The lanes that are not empty. `letter` and `colour` distinguish two compared runs."""
    ranges = [(rollback.step, rollback.to_step) for rollback in run.rollbacks]
    lanes = [
        Lane("incidents", svg.COLOURS["bad"], _marks(row.step for row in run.incidents.rows), "o"),
        Lane("skipped", svg.COLOURS["warn"], run.skipped, "x"),
        Lane("overflows", svg.COLOURS["muted"], run.overflows, "x"),
        Lane("rollbacks", svg.COLOURS["bad"], _marks(step for step, _ in ranges), "<", ranges[:MAX_ARROWS]),
        Lane("resumed", svg.COLOURS["first"], _marks(step for step, _ in run.resumes), ">"),
        Lane("checkpoints", svg.COLOURS["good"], _marks(each.step for each in run.checkpoints), "s", hollow=run.saved),
    ]
    filled = [lane for lane in lanes if lane.marks or lane.hollow]
    return [replace(lane, colour=colour, title=f"{letter} {lane.title}") for lane in filled] if letter else filled


def _marks(steps: Iterable[int]) -> Marks:
    marks = Marks()
    for step in sorted(steps):
        marks.add(step)
    return marks


def draw_lanes(axis: Axes, lanes: Sequence[Lane], per_pixel: float) -> None:
    axis.set_ylim(len(lanes) - 0.5 if lanes else 0.5, -0.5)
    axis.set_yticks(range(len(lanes)), [lane.title for lane in lanes], fontsize=11)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(False, axis="x")
    for index, lane in enumerate(lanes):
        for start, end in lane.ranges:
            axis.plot([end, start], [index, index], color=lane.colour, linewidth=3, alpha=0.45)
        steps = [span.first for span in lane.hollow.spans(6 * per_pixel)] if lane.hollow else []
        if steps:
            row, fill = [index] * len(steps), svg.PANEL
            axis.scatter(steps, row, s=30, marker=lane.marker, facecolor=fill, edgecolor=lane.colour, zorder=3)
        spans = lane.marks.spans(4 * per_pixel)
        for span in spans:
            if span.last > span.first:
                axis.plot(
                    [span.first, span.last], [index, index], color=lane.colour, linewidth=5, solid_capstyle="round"
                )
        starts = [span.first for span in spans]
        axis.scatter(starts, [index] * len(spans), s=38, marker=lane.marker, color=lane.colour, zorder=4)
