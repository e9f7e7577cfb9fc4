"""The course of a run in plain numbers: a schedule that has ended too early, a loss that does not get below a constant answer, or
that jumps up and down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.history import Recent, Smooth
from ..core.verdict import Finding

EARLY = 40
SWINGS = 24
"""Committed steps over which a loss is looked at for jumps."""


@dataclass
class Course:
    """Numbers of committed steps only."""

    num_seen: int = 0
    highest_lr: float = 0.0
    num_ended: int = 0
    """Steps in a row whose learning rate is practically zero."""
    constant: Smooth = field(default_factory=lambda: Smooth(1.0))
    """Mean loss of the best answer that is the same for every sample."""
    smooth: Smooth = field(default_factory=lambda: Smooth(0.98))
    lowest: float = math.inf
    """Of the smoothed loss."""
    first: Smooth = field(default_factory=lambda: Smooth(1.0))
    """Mean of the first `EARLY` losses."""
    losses: Recent = field(default_factory=lambda: Recent(SWINGS))
    start: float | None = None

    def learn(self, loss: float, lrs: Sequence[float]) -> None:
        self.num_seen += 1
        self.start = loss if self.start is None else self.start
        lr = max(lrs, default=0.0)
        self.highest_lr = max(self.highest_lr, lr)
        self.num_ended = self.num_ended + 1 if self.highest_lr > 0 and lr <= 1e-6 * self.highest_lr else 0
        if math.isfinite(loss):
            self.losses.append(loss)
            if self.num_seen <= EARLY:
                self.first.add(loss)
            elif self.smooth.add(loss) < self.lowest and self.smooth.count >= EARLY:
                self.lowest = self.smooth.mean

    def ended_schedule(self, total_steps: int | None, lr: float) -> Finding | None:
        if self.num_ended < 3 or total_steps is None or total_steps - self.num_seen < max(5, total_steps // 10):
            return None
        text = (
            f"the learning rate fell from {self.highest_lr:.3g} to {lr:.3g}, and {total_steps - self.num_seen} of {total_steps} "
            "steps are still to come"
        )
        return Finding("schedule_ended", text)

    def no_progress(self, after: int | None, total_steps: int | None) -> Finding | None:
        """Judged by the targets of some batches, so with some room."""
        if after is None or self.constant.mean <= 0:
            return None
        after = after if total_steps is None else min(after, max(100, total_steps // 2))
        if self.num_seen < after:
            return None
        constant, loss = self.constant.mean, self.smooth.mean
        if self.lowest < 0.95 * constant and (loss < 0.99 * self.first.mean or loss < 0.5 * constant):
            return None
        text = (
            f"after {self.num_seen} steps the loss is {loss:.4g}, at first it was {self.first.mean:.4g}; the same answer for every "
            f"sample would give about {constant:.4g}"
        )
        return Finding("no_progress", text)

    def oscillation(self) -> Finding | None:
        """Up and down in turn, by more than the level itself, and no lower than at the start: noise does not keep such a beat."""
        if len(self.losses) < SWINGS or self.start is None:
            return None
        losses = list(self.losses)
        changes = [after - before for before, after in itertools.pairwise(losses)]
        turns = sum(one * other < 0 for one, other in itertools.pairwise(changes))
        level = sum(losses) / len(losses)
        size = sum(map(abs, changes)) / len(changes)
        if turns < len(changes) - 2 or size <= 0.5 * abs(level) or level < abs(self.start):
            return None
        return Finding("oscillation", f"the loss goes up and down in every step, by {size:.3g} around {level:.3g}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_seen": self.num_seen,
            "highest_lr": self.highest_lr,
            "num_ended": self.num_ended,
            "first": [self.first.mean, self.first.count],
            "constant": [self.constant.mean, self.constant.count],
            "smooth": [self.smooth.mean, self.smooth.count],
            "lowest": None if math.isinf(self.lowest) else self.lowest,
            "losses": list(self.losses),
            "start": self.start,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("num_seen", "highest_lr", "num_ended", "start"):
            setattr(self, name, state[name])
        self.smooth, self.constant = Smooth(0.98, *state["smooth"]), Smooth(1.0, *state["constant"])
        self.first = Smooth(1.0, *state["first"])
        self.lowest = math.inf if state["lowest"] is None else state["lowest"]
        self.losses = Recent(SWINGS, state["losses"])
