"""Suspects that training has diverged permanently when the loss has stayed far above its best for many steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.history import Recent
from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Doubt, Verdict
from ..core.view import StepView
from .base import Guard

BLOCK = 10
"""Steps of which the median is taken: outliers do not move it."""


@dataclass
class RollbackConfig:
    rise: float = option(0.15, gt=0.0)
    """The loss has risen when its median over ten steps is this share above the best one, …"""
    noise: float = option(8.0, ge=0.0)
    """… this many deviations of such a median above it, …"""
    patience: int = option(20, ge=1)
    """… and when that has been so for this many committed steps in a row."""
    memory: int = option(600, ge=50)
    """The best one is that of the last N committed steps: what was before is another phase of training."""
    accept_after: int = option(3, ge=1)
    """Rollbacks within the last 50 × `patience` steps after which the new level is accepted: going back did not help."""


class Rollback(Guard):
    """Its verdicts are doubtful: short runs from here and from an earlier state are compared, and decide."""

    Config = RollbackConfig
    config: RollbackConfig

    def __init__(self, config: RollbackConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.tolerance = 1.0
        """How much more it takes than `rise` and `noise` say: more after each rise that turned out to be no damage."""
        self._begin()

    def _begin(self) -> None:
        self.levels = Recent(max(self.config.memory // BLOCK, 3))
        self.newest: list[float] = []
        self.steps = Recent(4 * BLOCK)
        self.last: float | None = None
        self.num_above = 0

    @property
    def best(self) -> float:
        return min(self.levels, default=math.inf)

    def judge(self, view: StepView) -> Verdict:
        if self.num_above < self.config.patience:
            return COMMIT
        level = self.levels[-1]
        reason = f"the loss (median {level:.4g}) has been above its best {self.best:.4g} for {self.num_above} steps"
        if self._did_not_help(view):
            return Verdict(reason=f"{reason}; accepted as a new level, because going back did not help")
        evidence = {"signal": "loss", "value": level, "best": self.best}
        return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence, doubt=Doubt.BRANCHES)

    def learn(self, view: StepView, decision: Decision) -> None:
        if decision.was_tried(self.name):
            self.tolerance *= 1.5
        if decision.was_tried(self.name) or (self.num_above >= self.config.patience and self._did_not_help(view)):
            self._begin()
        loss = view.loss
        if not math.isfinite(loss):
            return
        if self.last is not None:
            self.steps.add(abs(loss - self.last))
        self.last = loss
        self.newest.append(loss)
        if self.num_above:
            self.num_above += 1
        if len(self.newest) == BLOCK:
            self._close_block()

    def _close_block(self) -> None:
        level = statistics.median(self.newest)
        self.newest = []
        if self.levels:
            # Of single steps, from neighbours, so that a trend does not count as noise; a median of ten varies 0.4 times as much.
            noise = 0.4 * 1.4826 * statistics.median(self.steps) / math.sqrt(2.0)
            enough = self.tolerance * max(self.config.rise * abs(self.best), self.config.noise * noise)
            self.num_above = max(self.num_above, BLOCK) if level > self.best + enough else 0
        self.levels.add(level)

    def _did_not_help(self, view: StepView) -> bool:
        since = view.step - 50 * self.config.patience
        return sum(step >= since for step in view.rollback_steps) >= self.config.accept_after

    def state_dict(self) -> dict[str, Any]:
        return {
            "levels": list(self.levels),
            "newest": list(self.newest),
            "steps": list(self.steps),
            "last": self.last,
            "num_above": self.num_above,
            "tolerance": self.tolerance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin()
        if "levels" not in state:  # of a version that kept a smoothed loss
            return
        self.levels = Recent(self.levels.maxlen or 0, state["levels"])
        self.newest, self.steps = list(state["newest"]), Recent(4 * BLOCK, state["steps"])
        self.last, self.num_above, self.tolerance = state["last"], state["num_above"], state["tolerance"]
