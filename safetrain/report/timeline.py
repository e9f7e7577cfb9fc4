"""The timeline: loss, gradient norm and learning rate over the steps, with incidents and other events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..core.numbers import on_axis
from . import svg
from .lanes import draw_lanes, lanes_of
from .run import RunHistory
from .series import Floats, Series, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELS = 40
"""If there are more incidents, they are not marked in the curves, only in the row below."""
TOP, GAP, BOTTOM, RIGHT = 30, 34, 46, 16
ROOM = 24
"""Height for the numbers of incidents."""
LIMIT = 1e250
"""Larger numbers are clipped, because the axis needs a margin above them."""
BAD, WARN = svg.COLOURS["bad"], svg.COLOURS["warn"]


@dataclass(frozen=True)
class Size:
    width: int
    panels: tuple[int, int, int]
    """Heights of loss, gradient norm and learning rate."""
    lane: int
    num_bins: int
    left: int


WIDE = Size(1200, (220, 120, 90), 24, 900, 92)
NARROW = Size(400, (180, 120, 90), 24, 300, 74)


@dataclass(frozen=True)
class Signal:
    title: str
    committed: str
    refused: str = ""
    is_log: bool = True
    """Log scale if the values span several orders of magnitude."""


SIGNALS = (
    Signal("loss", "loss", "refused_loss"),
    Signal("gradient norm", "grad_norm", "refused_grad_norm"),
    Signal("learning rate", "lr", is_log=False),
)


def timeline(runs: Sequence[RunHistory], size: Size, name: str) -> str:
    """One run, or two in the same axes, as an SVG element."""
    colours = [svg.COLOURS[colour] for colour in ("first", "second")]
    letters = [("", "")] if len(runs) == 1 else list(zip("AB", colours, strict=True))
    lanes = [
        lane for run, (letter, colour) in zip(runs, letters, strict=True) for lane in lanes_of(run, letter, colour)
    ]
    heights = [*size.panels, max(len(lanes), 1) * size.lane]
    top = TOP + (ROOM if len(runs) == 1 and runs[0].incidents else 0)
    total = top + sum(heights) + GAP * 3 + BOTTOM
    last = max(*(run.last_step for run in runs), 1)
    with svg.style(), np.errstate(all="ignore"):
        drawn = svg.figure(size.width, total)
        axes: list[Axes] = []
        y = total - top
        for height in heights:
            y -= height
            box = (size.left / size.width, y / total, (size.width - size.left - RIGHT) / size.width, height / total)
            axes.append(drawn.add_axes(box, sharex=axes[0] if axes else None))
            y -= GAP
        axes[0].set_xlim(-0.012 * last, last * 1.012)
        for axis, signal in zip(axes, SIGNALS, strict=False):
            _draw_signal(axis, signal, runs, colours, size, last)
        if len(runs) == 1:  # the lines of two runs could not be distinguished
            _incidents(axes[:3], runs[0], last, size)
        draw_lanes(axes[3], lanes, last / size.width)
        _label_steps(axes[3], size)
        return svg.render(drawn, name, "Loss, gradient norm and learning rate over the steps, with incidents marked")


def _label_steps(axis: Axes, size: Size) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_xlabel("attempted step")
    axis.tick_params(axis="x", length=4)
    axis.xaxis.set_major_locator(MaxNLocator(10 if size.width > 600 else 4, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _draw_signal(
    axis: Axes, signal: Signal, runs: Sequence[RunHistory], colours: Sequence[str], size: Size, last: int
) -> None:
    axis.set_title(signal.title, loc="left", fontsize=12, color=svg.INK, pad=7, fontweight="bold")
    axis.tick_params(labelbottom=False, length=0)
    curves: list[Floats] = []
    for run, colour in zip(runs, colours, strict=False):
        curves.append(_curve(axis, getattr(run, signal.committed), colour, size))
        if signal.committed == "loss":
            curves.append(_evaluations(axis, run, colour))
    refused = [getattr(run, signal.refused) for run in runs] if signal.refused else []
    refused_values = [series.points(size.num_bins)[1] for series in refused]
    top = _set_scale(axis, np.concatenate(curves), refused_values, signal.is_log or len(runs) > 1)
    for series, colour in zip(refused, colours if len(runs) > 1 else [WARN], strict=False):
        _refused(axis, series, size, top, colour, is_labelled=len(runs) == 1)
    labels = []
    for index, run in enumerate(runs):
        every = [getattr(run, signal.committed), *refused[index : index + 1]]
        colour = colours[index] if len(runs) > 1 else BAD
        words = [_non_finite(axis, every, kind, index, last / size.width, colour) for kind in ("nan", "inf")]
        labels += [f"{'AB'[index]}: {word}" if len(runs) > 1 else word for word in words if word]
    if labels:
        axis.set_title("   ".join(labels), loc="right", fontsize=12, color=BAD, pad=7, fontweight="bold")


def _curve(axis: Axes, series: Series, colour: str, size: Size) -> Floats:
    steps, values = series.points(size.num_bins)
    values = values.clip(-LIMIT, LIMIT)
    if len(steps):
        axis.plot(steps, values, color=colour, linewidth=1.5, marker="o" if len(steps) < 2 else None, markersize=4)
    return values


def _evaluations(axis: Axes, run: RunHistory, colour: str) -> Floats:
    found = [(e["step"], e.get("loss")) for e in run.evaluations]
    points = [(step, value) for step, value in found if isinstance(value, float) and abs(value) < LIMIT]
    points = points[:: max(1, math.ceil(len(points) / 200))]
    if points:
        steps, values = zip(*points, strict=True)
        axis.scatter(steps, values, s=26, marker="D", facecolor=svg.PANEL, edgecolor=colour, linewidths=1.4, zorder=5)
    return np.asarray([value for _, value in points], dtype=np.float64)


# ---- what was not committed ------------------------------------------------------------------------------------------


def _refused(axis: Axes, series: Series, size: Size, top: float, colour: str, is_labelled: bool) -> None:
    """Crosses; those above the scale are at its upper edge, with the largest value as text."""
    steps, values = series.points(size.num_bins)
    if not len(steps):
        return
    inside = values <= top
    axis.scatter(steps[inside], values[inside], s=30, marker="x", color=colour, linewidths=1.5, zorder=4)
    if inside.all():
        return
    edge = axis.get_xaxis_transform()
    outside = steps[~inside]
    axis.scatter(outside, [0.83] * len(outside), transform=edge, s=34, marker=6, color=colour, linewidths=1.5, zorder=4)
    if not is_labelled:
        return
    highest = int(np.argmax(values))
    is_right = steps[highest] > 0.6 * axis.get_xlim()[1]
    axis.annotate(
        f"up to {values[highest]:.2g}".replace("e+", "e"), (steps[highest], 0.83), xycoords=edge,
        xytext=(-8 if is_right else 8, 1), textcoords="offset points", ha="right" if is_right else "left", va="center",
        color=colour, fontsize=11, zorder=8,
    )  # fmt: skip


def _non_finite(axis: Axes, series: Sequence[Series], kind: str, index: int, per_pixel: float, colour: str) -> str:
    """Marks along the upper edge, merged to bars where they are dense; returns `NaN ×3`."""
    marker, word, height = ("X", "NaN", 0.955) if kind == "nan" else ("^", "Inf", 0.9)
    height -= 0.08 * index
    spans: list[Span] = [span for each in series for span in getattr(each, kind).spans(3 * per_pixel)]
    if not spans:
        return ""
    edge = axis.get_xaxis_transform()
    for span in spans:
        if span.last - span.first > 6 * per_pixel:
            ends = [span.first, span.last]
            axis.plot(ends, [height] * 2, transform=edge, color=colour, linewidth=4, solid_capstyle="round", zorder=6)
    starts = [span.first for span in spans]
    axis.scatter(
        starts, [height] * len(spans), transform=edge, marker=marker, s=46, color=colour, linewidths=0, zorder=7
    )
    return f"{word} ×{sum(getattr(each, kind).count for each in series):,}"


# ---- the scale -------------------------------------------------------------------------------------------------------


def _set_scale(axis: Axes, values: Floats, refused: Sequence[Floats], may_be_log: bool) -> float:
    """Scales to the committed values, so that a refused outlier does not flatten the curve; returns the upper limit."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: on_axis(value)))
    if not len(values):
        values = np.concatenate([*refused, values])
    if not len(values):
        axis.set_ylim(0, 1)
        axis.set_yticks([])
        return 1.0
    values = values.clip(-LIMIT, LIMIT)
    low, high = float(values.min()), float(values.max())
    positive = values[values > 1 / LIMIT]
    median = float(np.median(np.abs(values)))
    if may_be_log and low >= 0 and len(positive) and high > 30 * float(np.quantile(positive, 0.02)):
        floor, room = float(positive.min()), max(0.3 * math.log10(high / float(positive.min())), 0.3)
        top = 10 ** (math.log10(high) + min(room, 30.0))
        axis.set_yscale("log", nonpositive="clip")
        axis.set_ylim(floor / 1.6, top)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: on_axis(value)))
        first, last = math.ceil(math.log10(floor / 1.6)), math.floor(math.log10(top))
        axis.set_yticks([10.0**e for e in range(first, last + 1, max(1, math.ceil((last - first) / 4)))])
    elif may_be_log and low < 0 and max(-low, high) > 1000 * max(median, 1e-300):
        axis.set_yscale("symlog", linthresh=max(median, 1e-300))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: on_axis(value)))
        top = high * 10
    else:
        room = (high - low) or abs(high) or 1.0
        top = high + 0.3 * room
        axis.set_ylim(low - 0.08 * room, top)
        axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.minorticks_off()
    return top


# ---- incidents -------------------------------------------------------------------------------------------------------


def _incidents(axes: Sequence[Axes], run: RunHistory, last: int, size: Size) -> None:
    """Vertical lines through all curves, with numbers above; incidents that are close together share a label."""
    rows = run.incidents.rows
    if len(rows) > MAX_LABELS:
        return  # they would hide the curves; the row below shows all of them
    for step in sorted({row.step for row in rows}):
        for axis in axes:
            end = 1.0 if axis is not axes[0] else 1.0 + ROOM / size.panels[0]  # up to its number
            axis.axvline(
                step, ymax=end, color=BAD, linewidth=1, linestyle=(0, (2, 3)), alpha=0.8, zorder=2, clip_on=False
            )
    for label in _labels([(row.number, row.step) for row in rows], last / (size.width - size.left - RIGHT)):
        link = f"#incident-{label.first}"
        axes[0].annotate(
            label.text, (label.middle, 1.0), xycoords=axes[0].get_xaxis_transform(), xytext=(0, 33), textcoords="offset points",
            ha="center", va="center", fontsize=11, fontweight="bold", color=svg.PANEL, annotation_clip=False, url=link, zorder=9,
            bbox={"boxstyle": "round,pad=0.28", "facecolor": BAD, "edgecolor": "none", "url": link},
        )  # fmt: skip


@dataclass(frozen=True)
class Label:
    """The label of one incident, or of neighbouring ones."""

    first: int
    last: int
    begin: int
    end: int
    """Steps."""

    @property
    def text(self) -> str:
        return f"{self.first}" + (f"–{self.last}" if self.last > self.first else "")

    @property
    def middle(self) -> float:
        return (self.begin + self.end) / 2

    def overlaps(self, other: Label, per_pixel: float) -> bool:
        room = (len(self.text) + len(other.text)) / 2 * 7.5 + 12
        return other.middle - self.middle < room * per_pixel


def _labels(incidents: list[tuple[int, int]], per_pixel: float) -> list[Label]:
    placed: list[Label] = []
    for number, step in sorted(incidents, key=lambda incident: incident[1]):
        label = Label(number, number, step, step)
        while placed and placed[-1].overlaps(label, per_pixel):
            before = placed.pop()
            label = Label(before.first, label.last, before.begin, label.end)
        placed.append(label)
    return placed
