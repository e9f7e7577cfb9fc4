"""The plots; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INK, OURS, THEIRS = "#333333", "#1b7f5c", "#9aa5b1"


def _axes(num: int, size: tuple[float, float]) -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "safetrain", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, num, figsize=size, layout="constrained", squeeze=False)
    for each in axes[0]:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def ratios(path: Path, tables: Mapping[str, Mapping[str, float]], base: str) -> None:
    """Bars by workload: the time of a step relative to `base`."""
    figure, axes = _axes(len(tables), (3.4 * len(tables), 3.4))
    for axis, (title, ratio_of) in zip(axes, tables.items(), strict=True):
        names = list(ratio_of)[::-1]
        colors = [OURS if name.startswith("safetrain") else THEIRS for name in names]
        axis.barh(names, [ratio_of[name] for name in names], color=colors)
        axis.axvline(1.0, color=INK, linewidth=0.8)
        axis.set_title(title)
        axis.set_xlabel(f"time per step / {base}")
        if axis is not axes[0]:
            axis.set_yticks([])
    figure.savefig(path, metadata={"Date": None})


def scaling(path: Path, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Overhead in percent against a count, a panel for each kind."""
    figure, axes = _axes(len(series), (3.6 * len(series), 3.0))
    for axis, (kind, points) in zip(axes, series.items(), strict=True):
        axis.semilogx([x for x, _ in points], [100 * (y - 1) for _, y in points], "o-", color=OURS)
        axis.axhline(0.0, color=INK, linewidth=0.8)
        axis.set_xlabel(kind)
        axis.set_ylabel("overhead over plain + clip, %")
    figure.savefig(path, metadata={"Date": None})
