"""Refuses every step whose loss, gradient, buffers or state are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.options import option
from ..core.verdict import COMMIT, Action, Verdict
from ..core.view import DeviceStep, StepView
from .base import Guard

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class FiniteConfig:
    max_consecutive: int = option(10, ge=1)
    """Refusals in a row after which skipping is no longer enough and a rollback is asked for (a stop, without a snapshot
    to go back to)."""
    window: int = option(100, ge=1, le=1000)
    """Number of recent steps in which refusals are counted."""
    max_in_window: int = option(30, ge=1, within="window")
    """Refusals within `window` steps after which a rollback is asked for."""
    state_every: int = option(50, ge=1)
    """Check parameters and optimizer state every N steps. They are always checked when a step is refused and before
    anything is saved."""
    drop_micro_batch: bool = False
    """With gradient accumulation: leave non-finite micro-batches out and train on the rest of the window. Costs a second
    pass over the window, and only when the window was bad."""
    max_overflows: int = option(20, ge=1)
    """fp16: loss-scaler overflows in a row that are still normal."""
    min_loss_scale: float = option(1.0, gt=0.0)
    """fp16: a loss scale below this has collapsed."""


class Finite(Guard):
    Config = FiniteConfig
    config: FiniteConfig
    measures_backward = False
    over_ranks = "max"

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        peaks = {}
        if (buffers := step.buffer_peak()) is not None:
            peaks["buffers"] = buffers
        if step.step % self.config.state_every == 0 and (state := step.state_peak()) is not None:
            peaks["state"] = state
        return peaks

    def judge(self, view: StepView) -> Verdict:
        trouble = self._trouble(view)
        if trouble is None:
            return COMMIT
        signal, value, reason = trouble
        evidence = {"signal": signal, "value": value}
        if signal == "lr":  # the schedule moves with committed steps only, so this does not pass
            return Verdict(Action.SKIP, reason=reason, evidence=evidence)
        if bad := view.bad_state():
            what = ", ".join(f"{name} ({problem})" for name, problem in list(bad.items())[:5])
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            reason = f"{reason}; the training state itself is not finite: {what}{more}"
            return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence, bad_state=dict(bad))
        if view.consecutive_refusals + 1 >= self.config.max_consecutive:
            reason = f"{reason}; {view.consecutive_refusals + 1} refused steps in a row (max_consecutive)"
            return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence, if_state_is_bad=True)
        within = view.refusals_within(self.config.window) + 1
        if within >= self.config.max_in_window:
            reason = f"{reason}; {within} of the last {self.config.window} steps refused (max_in_window)"
            return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence, if_state_is_bad=True)
        return Verdict(Action.SKIP, reason=reason, evidence=evidence, salvage=self.config.drop_micro_batch)

    def _trouble(self, view: StepView) -> tuple[str, float, str] | None:
        """The first signal that is not finite: its name, its value, and a sentence."""
        if not math.isfinite(view.loss):
            return "loss", view.loss, f"the loss is {view.loss}"
        if view.scaler_overflow:
            return self._collapsed_scale(view)
        if not math.isfinite(view.grad_norm):
            reason = f"the gradient norm is {view.grad_norm} while the loss is {view.loss:.6g}"
            return "grad_norm", view.grad_norm, reason
        if view.norm_overflow and not view.limits.bounded:
            reason = (
                f"gradient norm overflow ({view.grad_norm:.3g}, every gradient is finite) and nothing bounds it: there is no "
                "clip guard, or it is adaptive and still warming up"
            )
            return "grad_norm", view.grad_norm, reason
        for lr in view.lrs:
            if not math.isfinite(lr):
                return "lr", lr, f"the scheduled learning rate is {lr}"
        for signal in ("buffers", "state") if view.signals else ():
            value = view.signals.get(f"{self.name}.{signal}", 0.0)
            if not math.isfinite(value):
                return signal, value, f"the largest value in the model's {signal} is {value}"
        return None

    def _collapsed_scale(self, view: StepView) -> tuple[str, float, str] | None:
        if view.consecutive_overflows > self.config.max_overflows:
            reason = (
                f"{view.consecutive_overflows} fp16 overflows in a row (max_overflows is {self.config.max_overflows})"
            )
            return "loss_scale", view.loss_scale, reason
        if view.loss_scale < self.config.min_loss_scale:
            reason = f"the fp16 loss scale collapsed to {view.loss_scale:.3g} (min_loss_scale is {self.config.min_loss_scale:.3g})"
            return "loss_scale", view.loss_scale, reason
        return None
