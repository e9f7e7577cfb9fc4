"""Clips the gradient, by default only outliers. Never refuses a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.options import option
from ..core.verdict import COMMIT, Decision, Verdict
from ..core.view import Limits, StepView
from .base import Guard

ADAPTIVE = {"mode": ("adaptive",)}


@dataclass
class ClipConfig:
    mode: str = option("adaptive", choices=("adaptive", "norm", "group_norm", "value"))
    """`norm`: global L2 norm at most `max_norm`. `group_norm`: the same for each optimizer parameter group on its own.
    `value`: every element (of a complex one, each part) at most `max_value`. `adaptive`: bounds outliers only, far above all recent norms; a healthy run is bit for bit what it is without."""
    max_norm: float = option(1.0, gt=0.0, only={"mode": ("norm", "group_norm")})
    """Limit of `norm` and `group_norm`. Given without a `mode`, it means `norm`."""
    max_value: float = option(1.0, gt=0.0, only={"mode": ("value",)})
    """Limit of `value`. Given without a `mode`, it means `value`."""
    z: float = option(8.0, gt=0.0, only=ADAPTIVE)
    """`adaptive`: deviations above the recent mean norm that are still allowed."""
    min_ratio: float = option(20.0, ge=1.0, only=ADAPTIVE)
    """`adaptive`: the limit is never below this many times the recent mean norm, however steady the norms are."""
    decay: float = option(0.97, gt=0.0, lt=1.0, only=ADAPTIVE)
    """`adaptive`: weight of the past in the running mean and variance."""
    warmup_steps: int = option(25, ge=1, only=ADAPTIVE)
    """`adaptive`: committed steps to watch before clipping anything."""
    memory: int = option(1000, ge=1, only=ADAPTIVE)
    """`adaptive`: an outlier that came before within this many steps, apart from its neighbours, is no outlier the second time:
    rewards are rare, and tails are long."""


APART = 25
"""Steps within which large norms belong to one event."""


class Clip(Guard):
    Config = ClipConfig
    config: ClipConfig

    def __init__(self, config: ClipConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.num_seen = 0
        self.mean = 0.0
        self.variance = 0.0
        self.events: list[tuple[int, float]] = []
        """When norms were large, with the largest of each time, before clipping; the newest last."""

    def limits(self) -> Limits:
        mode = self.config.mode
        if mode == "norm":
            return Limits(norm=self.config.max_norm)
        if mode == "group_norm":
            return Limits(group_norm=self.config.max_norm)
        if mode == "value":
            return Limits(value=self.config.max_value)
        if self.num_seen < self.config.warmup_steps or self.mean == 0.0:
            return Limits()
        spread = max(self.config.z * math.sqrt(self.variance), (self.config.min_ratio - 1.0) * self.mean)
        repeated = sorted(norm for _, norm in self.events)[-2:-1]
        return Limits(
            norm=max(self.mean + spread, *(1.5 * norm for norm in repeated)) if repeated else self.mean + spread
        )

    def judge(self, view: StepView) -> Verdict:
        return COMMIT

    def learn(self, view: StepView, decision: Decision) -> None:
        # The clipped norm is what acted on the weights; learning the raw one would let one spike lift the limit.
        norm = min(view.grad_norm, view.limits.norm)
        if not math.isfinite(norm):
            return
        is_large = self.num_seen >= self.config.warmup_steps and view.grad_norm > 0.5 * self.limits().norm
        if is_large and not view.norm_overflow:  # squares of such gradients are infinite: never let through as they are
            self._note_event(view.step, view.grad_norm)
        self.num_seen += 1
        # A running average during warm-up, so that the first norms do not weigh more than the rest.
        weight = max(1.0 - self.config.decay, 1.0 / self.num_seen)
        delta = norm - self.mean
        self.mean += weight * delta
        self.variance = (1.0 - weight) * (self.variance + weight * delta * delta)

    def _note_event(self, step: int, norm: float) -> None:
        self.events = [event for event in self.events if event[0] > step - self.config.memory][-50:]
        if self.events and step - self.events[-1][0] <= APART:
            norm = max(norm, self.events.pop()[1])
        self.events.append((step, norm))

    def state_dict(self) -> dict[str, Any]:
        events = [list(event) for event in self.events]
        return {"num_seen": self.num_seen, "mean": self.mean, "variance": self.variance, "events": events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_seen, self.mean, self.variance = state["num_seen"], state["mean"], state["variance"]
        self.events = [(int(step), float(norm)) for step, norm in state.get("events", [])]
