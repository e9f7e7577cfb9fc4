"""Lowers the learning rate after an incident of training dynamics, and raises it back gradually."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.options import option
from ..core.verdict import COMMIT, Decision, Verdict
from ..core.view import StepView
from .base import Guard


@dataclass
class BackoffConfig:
    factor: float = option(0.5, gt=0.0, lt=1.0)
    """The learning rate is multiplied by this at each incident of training dynamics. A fault in the data does not lower it."""
    floor: float = option(0.01, gt=0.0, le=1.0)
    """The scale never gets smaller than this."""
    recovery_steps: int = option(100, ge=1)
    """Committed steps in which the scale returns from `floor` to 1, exponentially (sooner from a higher scale)."""
    merge_steps: int = option(10, ge=1)
    """Refusals within this many steps of the first one are one incident; a rollback among them lowers the rate again."""
    restart_factor: float = option(0.1, gt=0.0, lt=1.0)
    """When training starts again from the beginning, the learning rate stays at this share of the schedule, unless a trial has found
    a better one."""
    lift_after: int = option(500, ge=1)
    """Committed steps at a lowered ceiling without trouble, for each incident so far and one more, after which the ceiling is doubled
    again: a rate that was too high early on need not be later, and if it is, that is noticed."""


@dataclass(frozen=True)
class Level:
    """The scale, the ceiling it may return to, and how much of the history it accounts for."""

    scale: float = 1.0
    ceiling: float = 1.0
    last_step: int = -1
    """The newest incident accounted for."""
    first_step: int = -1
    """The step that the newest incident began at."""
    num_incidents: int = 0
    num_restarts: int = 0
    num_calm: int = 0
    """Committed steps at the ceiling since it was lowered or lifted."""


class Backoff(Guard):
    """A multiplier outside the scheduler: the schedule itself is untouched and goes on when the scale is back at its ceiling.

    Each incident after the first lowers the ceiling, so a learning rate that keeps causing trouble is not returned to for long. The
    history of incidents is not rewound by a rollback, so a level that was rolled back accounts for them again.
    """

    Config = BackoffConfig
    config: BackoffConfig

    def __init__(self, config: BackoffConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.level = Level()

    def judge(self, view: StepView) -> Verdict:
        scale = self._level_at(view).scale
        if scale == 1.0:
            return COMMIT
        return Verdict(lr_scale=scale, reason=f"learning rate scaled by {scale:.4g}", evidence={"lr_scale": scale})

    def learn(self, view: StepView, decision: Decision) -> None:
        level = self._level_at(view)
        if level.scale == level.ceiling:
            self.level = level if level.ceiling == 1.0 else self._lifted(level)
            return
        growth = (1.0 / self.config.floor) ** (1.0 / self.config.recovery_steps)
        scale = level.scale * growth
        self.level = replace(level, scale=level.ceiling if scale > level.ceiling * (1.0 - 1e-9) else scale)

    def _lifted(self, level: Level) -> Level:
        if level.num_calm + 1 < self.config.lift_after * (1 + level.num_incidents):
            return replace(level, num_calm=level.num_calm + 1)
        return replace(level, ceiling=min(1.0, 2.0 * level.ceiling), num_calm=0)

    def _level_at(self, view: StepView) -> Level:
        level = self.level
        last = view.dynamics_steps[-1] if view.dynamics_steps else -1
        if level.last_step >= last and level.num_restarts >= view.num_restarts:
            return level  # nearly every step ends here
        rollbacks = set(view.rollback_steps)
        for step in view.dynamics_steps:
            if step > level.last_step:
                level = self._lowered(level, step, step in rollbacks, view.lr_shares.get(step))
        for index in range(level.num_restarts, view.num_restarts):
            share = view.restart_shares[index] if index < len(view.restart_shares) else None
            ceiling = max(level.ceiling * (self.config.restart_factor if share is None else share), self.config.floor)
            level = replace(
                level, ceiling=ceiling, scale=min(level.scale, ceiling), num_restarts=level.num_restarts + 1, num_calm=0
            )
        return level

    def _lowered(self, level: Level, step: int, is_rollback: bool, share: float | None) -> Level:
        factor = self.config.factor if share is None else share
        is_same = level.num_incidents > 0 and step - level.first_step <= self.config.merge_steps
        if is_same and not is_rollback:
            return replace(level, last_step=step)
        scale = max(level.scale * factor, min(self.config.floor, level.scale))
        ceiling = level.ceiling
        if level.num_incidents and not is_same:
            ceiling = max(ceiling * factor, min(self.config.floor, ceiling))
        first = level.first_step if is_same else step
        num_incidents = level.num_incidents + (0 if is_same else 1)
        return Level(min(scale, ceiling), ceiling, step, first, num_incidents, level.num_restarts)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.level)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level = Level(**state)
