"""What the guards would have suspected on an existing run: each of its steps is judged, and then learned from as
committed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.verdict import Action, merge
from ..core.view import StepView
from ..guards import REGISTRY, Guard
from .curve import Point

SIMULATED = {"finite": "suspects", "spike": "suspects", "rollback": "rollback_suspects"}
"""Guards that judge by what a curve holds, and where their suspects are listed."""


@dataclass(frozen=True)
class Suspect:
    step: int
    guard: str
    reason: str


@dataclass
class Simulation:
    points: Sequence[Point]
    found: list[Suspect] = field(default_factory=list)
    clips: list[int] = field(default_factory=list)
    """Steps whose gradient would have been bounded."""

    def steps_of(self, kind: str) -> list[int]:
        """The steps of the list of that name, each once."""
        return list(dict.fromkeys(s.step for s in self.found if SIMULATED[s.guard] == kind))

    def to_plain(self) -> dict[str, Any]:
        kinds = dict.fromkeys(SIMULATED.values())
        return {"steps": len(self.points), **{kind: self.steps_of(kind) for kind in kinds}, "clips": list(self.clips)}


def simulate(points: Sequence[Point], options: Mapping[str, Any]) -> Simulation:
    """`options`: the `guards` of a config. Those that look at more than loss, gradient norm and rate do not take part."""
    guards: dict[str, Guard] = {
        name: REGISTRY[name](config)
        for name, config in options.items()
        if name in (*SIMULATED, "clip") and config is not None and not isinstance(config, Mapping)
    }
    clip = guards.pop("clip", None)
    simulation = Simulation(points)
    for index, point in enumerate(points):
        limits = StepView(0, 0.0, 0.0).limits if clip is None else clip.limits()
        norm = point.grad_norm if math.isfinite(point.loss) and not math.isnan(point.grad_norm) else 0.0
        lr = 0.0 if math.isnan(point.lr) else point.lr
        view = StepView(index, point.loss, norm, lrs=(lr,), limits=limits)
        decision = merge((name, guard.verdict(view)) for name, guard in guards.items())
        for name, verdict in decision.verdicts.items():
            if verdict.action is not Action.COMMIT:
                simulation.found.append(Suspect(point.step, name, verdict.reason))
        if not math.isfinite(point.loss):
            continue
        if norm > limits.norm:
            simulation.clips.append(point.step)
        for guard in (*guards.values(), *(() if clip is None else (clip,))):
            guard.learn(view, decision.tried)
    return simulation


def draw(simulation: Simulation, path: Path, title: str = "") -> None:
    """The curve with what was suspected, as an image of the type that the name of the file says."""
    from .svg import style

    with style():
        from matplotlib.figure import Figure

        points = simulation.points
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        axes = figure.add_subplot()
        finite = [(p.step, p.loss) for p in points if math.isfinite(p.loss)]
        axes.plot(*zip(*finite, strict=True), color="#4878a8", linewidth=0.7, label="loss")
        losses = {point.step: point.loss for point in points}
        for kind, colour, marker in (("suspects", "#d1781d", "v"), ("rollback_suspects", "#c03028", "s")):
            steps = [step for step in simulation.steps_of(kind) if math.isfinite(losses[step])]
            label = f"{kind.replace('_', ' ')}: {len(simulation.steps_of(kind))}"
            axes.plot(steps, [losses[s] for s in steps], marker, color=colour, markersize=5, label=label)
        ordered = sorted(loss for _, loss in finite)
        axes.set_ylim(ordered[0] * 0.97 if ordered[0] > 0 else None, ordered[int(0.995 * (len(ordered) - 1))] * 1.03)
        axes.set(xlabel="step", ylabel="loss", title=title)
        axes.legend(loc="upper right", frameon=False)
        colours = {"text.color": "#222222", "axes.labelcolor": "#222222"}
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_color(colours["text.color"])
        figure.set_facecolor("white")
        figure.savefig(path, dpi=100)
