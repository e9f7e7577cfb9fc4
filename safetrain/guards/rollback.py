"""Asks for a rollback when the loss has stayed far above its best for many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.history import Smooth
from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Verdict
from ..core.view import StepView
from .base import Guard


@dataclass
class RollbackConfig:
    rise: float = option(0.15, gt=0.0)
    """The smoothed loss has diverged when it is this share above its best, …"""
    lost: float = option(0.3, gt=0.0, le=1.0)
    """… when this share of what was learned since the start is lost again, …"""
    noise: float = option(4.0, ge=0.0)
    """… when it is this many deviations of a single loss above the best, …"""
    patience: int = option(20, ge=1)
    """… and when all that has been so for this many committed steps in a row."""
    warmup_steps: int = option(25, ge=2)
    """Committed steps to watch before judging."""
    accept_after: int = option(3, ge=1)
    """Rollbacks within the last 50 × `patience` steps after which the new level is accepted: going back did not help."""


class Rollback(Guard):
    Config = RollbackConfig
    config: RollbackConfig

    def __init__(self, config: RollbackConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._begin()
        self.start = math.inf

    def _begin(self) -> None:
        self.last: float | None
        self.fast, self.variance, self.best, self.num_above, self.last = Smooth(0.9), Smooth(0.97), math.inf, 0, None

    def judge(self, view: StepView) -> Verdict:
        if self.num_above < self.config.patience:
            return COMMIT
        reason = f"the loss (smoothed {self.fast.mean:.4g}) has been above its best {self.best:.4g} for {self.num_above} steps"
        if self._did_not_help(view):
            return Verdict(reason=f"{reason}; accepted as a new level, because going back did not help")
        return Verdict(
            Action.ROLLBACK, reason=reason, evidence={"signal": "loss", "value": self.fast.mean, "best": self.best}
        )

    def learn(self, view: StepView, decision: Decision) -> None:
        if self.num_above >= self.config.patience and self._did_not_help(view):
            self._begin()
        loss = view.loss
        if not math.isfinite(loss):
            return
        if math.isinf(self.start):
            self.start = loss
        if self.last is not None:
            self.variance.add(0.5 * (loss - self.last) ** 2)  # of neighbours, so that a trend does not count as noise
        self.last = loss
        smoothed = self.fast.add(loss)
        if self.fast.count < self.config.warmup_steps:
            return
        self.best = min(self.best, smoothed)
        limit = self.best + max(
            self.config.rise * abs(self.best),
            self.config.lost * (self.start - self.best),
            self.config.noise * math.sqrt(self.variance.mean),
        )
        self.num_above = self.num_above + 1 if smoothed > limit else 0

    def _did_not_help(self, view: StepView) -> bool:
        since = view.step - 50 * self.config.patience
        return sum(step >= since for step in view.rollback_steps) >= self.config.accept_after

    def state_dict(self) -> dict[str, Any]:
        numbers = {"start": self.start, "best": self.best}
        return {
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "fast": [self.fast.mean, self.fast.count],
            "variance": [self.variance.mean, self.variance.count],
            "num_above": self.num_above,
            "last": self.last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start, self.best = (math.inf if state[name] is None else state[name] for name in ("start", "best"))
        self.fast, self.variance = Smooth(0.9, *state["fast"]), Smooth(0.97, *state["variance"])
        self.num_above, self.last = state["num_above"], state["last"]
