"""Lowers the learning rate after refusals, and lets it return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..options import option
from ..verdict import Decision, Verdict
from ..view import StepView
from .base import Guard


@dataclass
class BackoffConfig:
    factor: float = option(0.5, gt=0.0, lt=1.0)
    """The learning rate is multiplied by this at each refusal."""
    floor: float = option(0.01, gt=0.0, le=1.0)
    """The scale never gets smaller than this."""
    recovery_steps: int = option(100, ge=1)
    """Committed steps in which the scale returns from `floor` to 1, exponentially (sooner from a higher scale)."""


class Backoff(Guard):
    """A multiplier outside the scheduler: the schedule itself is untouched and goes on when the scale is back at 1."""

    Config = BackoffConfig
    config: BackoffConfig

    def __init__(self, config: BackoffConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.scale = 1.0

    def judge(self, view: StepView) -> Verdict:
        scale = self._scale(view)
        if scale == 1.0:
            return Verdict()
        return Verdict(lr_scale=scale, reason=f"learning rate scaled by {scale:.4g}", evidence={"lr_scale": scale})

    def learn(self, view: StepView, decision: Decision) -> None:
        growth = (1.0 / self.config.floor) ** (1.0 / self.config.recovery_steps)
        scale = self._scale(view) * growth
        self.scale = 1.0 if scale > 1.0 - 1e-9 else scale

    def _scale(self, view: StepView) -> float:
        scale = self.scale * self.config.factor**view.consecutive_refusals
        return max(scale, min(self.config.floor, self.scale))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]
