"""The histogram of an operand, with the values at which the result is bad marked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 460, 190
MAX_BARS = 64


@dataclass(frozen=True)
class Special:
    """A bar for zeros, NaN or Inf, which are not on the axis."""

    label: str
    count: int
    num_bad: int
    """How many of them are bad themselves, or give a bad result."""


def is_drawable(operand: dict[str, Any]) -> bool:
    """Whether there is anything to draw; malformed records are ignored."""
    return bool(_bars(operand) or _specials(operand))


def histogram(operand: dict[str, Any], name: str) -> str:
    """The histogram of an operand of an incident, as an SVG element."""
    bars, specials = _bars(operand), _specials(operand)
    counts, at_bad, edges = bars if bars else ([], [], [])
    with svg.style():
        drawn = svg.figure(WIDTH, HEIGHT)
        axis = drawn.add_axes((52 / WIDTH, 40 / HEIGHT, (WIDTH - 64) / WIDTH, (HEIGHT - 58) / HEIGHT))
        axis.bar(range(len(counts)), counts, width=0.92, align="edge", color=svg.COLOURS["first"], alpha=0.75)
        if any(at_bad):
            axis.bar(range(len(counts)), at_bad, width=0.92, align="edge", color=svg.COLOURS["bad"])
        ticks = _ticks(edges)
        start = len(counts) + 2.5 if counts else 0.0
        for index, special in enumerate(specials):
            position = start + index * 3.2
            axis.bar([position], [special.count], width=2.2, align="edge", color=svg.COLOURS["first"], alpha=0.75)
            if special.num_bad:
                axis.bar([position], [special.num_bad], width=2.2, align="edge", color=svg.COLOURS["bad"])
            middle = position + 1.1
            axis.text(middle, special.count, f"{special.count:,}", ha="center", va="bottom", fontsize=11, color=svg.INK)
            ticks.append((middle, special.label))
        _finish(axis, ticks, [*counts, *(special.count for special in specials)])
        return svg.render(drawn, name, f"Histogram of {operand['name']}")


def _bars(operand: dict[str, Any]) -> tuple[list[int], list[int], list[float]] | None:
    found = operand.get("histogram")
    try:
        counts, edges = [int(c) for c in found["counts"]], [float(e) for e in found["edges"]]  # type: ignore[index]
        at_bad = [int(c) for c in found.get("at_bad") or [0] * len(counts)]  # type: ignore[union-attr]
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    is_sound = 0 < len(counts) <= MAX_BARS and len(edges) == len(counts) + 1 and len(at_bad) == len(counts)
    return (counts, at_bad, edges) if is_sound and all(map(math.isfinite, edges)) else None


def _specials(operand: dict[str, Any]) -> list[Special]:
    found = operand.get("histogram")
    zeros, zeros_at_bad = _count(operand, "zeros"), _count(found, "zeros_at_bad")
    bars = [Special("0", zeros, min(zeros, zeros_at_bad))]
    for key, label in (("nan", "NaN"), ("neg_inf", "−inf"), ("inf", "+inf")):
        bars.append(Special(label, count := _count(operand, key), count))
    return [bar for bar in bars if bar.count > 0]


def _count(found: Any, key: str) -> int:
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, int) else 0


def _ticks(edges: list[float]) -> list[tuple[float, str]]:
    if not edges:
        return []
    if edges[0] == edges[-1]:
        return [(0.46, f"{edges[0]:.3g}")]
    wanted = sorted({round(i * (len(edges) - 1) / 4) for i in range(5)})
    return [(float(index), f"{edges[index]:.3g}".replace("-", "−")) for index in wanted]


def _finish(axis: Axes, ticks: list[tuple[float, str]], counts: list[int]) -> None:
    positions = [position for position, _ in ticks]
    axis.set_xticks(positions, [label for _, label in ticks], fontsize=11)
    axis.grid(False, axis="x")
    smallest, largest = min((c for c in counts if c), default=1), max(counts, default=1)
    if largest > 50 * smallest:
        axis.set_yscale("log")
        axis.set_ylim(0.7, largest * 3)
        axis.minorticks_off()
    else:
        from matplotlib.ticker import MaxNLocator

        axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axis.set_ylim(0, largest * 1.2)
    axis.set_title("how many values", loc="left", fontsize=11, color=svg.MUTED, pad=4)
    axis.tick_params(length=3, labelsize=11)
