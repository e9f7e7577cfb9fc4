"""Suspects a step whose loss, gradient norm or last update is far outside its recent range. A trial decides whether
it does harm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.history import Recent
from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Doubt, Verdict
from ..core.view import DeviceStep, StepView
from .base import Guard
from .excursion import Excursion
from .usual import Usual

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..tensors.update_size import UpdateSize


@dataclass
class SpikeConfig:
    z: float = option(3.0, gt=0.0)
    """Deviations above the present level at which three losses in a row are suspect. Two in a row need more, five need less; a single
    one must also be twice as far out as any for a long time."""
    min_ratio: float = option(1.1, ge=1.0)
    """A suspect loss is also this many times the level: small steady losses have tiny deviations."""
    grad_ratio: float = option(30.0, gt=1.0)
    """A gradient norm this many times the largest of the recent ones is suspect, whatever the loss says."""
    update_ratio: float = option(10.0, gt=1.0)
    """The same for the size of the update before, relative to the weights: it grows before the loss does."""
    window: int = option(64, ge=16)
    """Committed steps that the statistics are taken over."""
    warmup_steps: int = option(25, ge=2)
    """Committed steps to watch before judging by statistics. Until then only a loss of `extreme` times the largest so far is suspect."""
    extreme: float = option(1000.0, gt=1.0)
    """See `warmup_steps`."""
    tried_per_1000: float = option(2.0, gt=0.0)
    """Trials of steps that turned out to be harmless, per 1000 steps, that are too many: then suspicion takes more, and soon pauses."""
    max_consecutive: int = option(5, ge=1)
    """Steps in a row that a trial has convicted, after which a rollback is asked for."""
    accept_after: int = option(60, ge=1)
    """Refusals in a row after which the new level is accepted: the data has changed, and going back did not help."""


PATIENCE = 3.0
"""Harmless suspects, counted with a half-life, after which steps are let pass untried until the count has fallen."""


class Spike(Guard):
    """Looks upward only, at finite values only (`finite` handles the others), and learns from committed steps only.

    It refuses nothing by itself: its verdicts are doubtful, and a trial of the update decides. A suspect that was committed was harmless,
    which raises what it takes to be suspect for a while.
    """

    Config = SpikeConfig
    config: SpikeConfig
    measures_backward = False
    over_ranks = "max"

    def __init__(self, config: SpikeConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.losses = Usual(self.config.window, self.config.min_ratio)
        self.norms = Recent(self.config.window)
        self.updates = Recent(self.config.window)
        self.num_harmless = 0.0
        """Suspects that turned out to be harmless, the older ones counting less."""
        self.excursion = Excursion()
        self.first: float | None = None
        self._size: UpdateSize | None = None

    def attach(self, model: nn.Module) -> None:
        from ..tensors.update_size import UpdateSize

        self._size = UpdateSize(model)

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        size = None if self._size is None else self._size.measure(step.step)
        return {} if size is None else {"update": size.to(step.loss.device)}

    def judge(self, view: StepView) -> Verdict:
        if self.excursion.asks(view.loss):
            return self.excursion.verdict(view.loss)
        if (found := self._suspicion(view)) is None:
            return COMMIT
        reason, signal, value = found
        if view.consecutive_refusals >= self.config.accept_after:
            return Verdict(
                reason=f"{reason}; accepted as a new level after {view.consecutive_refusals} refusals in a row"
            )
        go_back = view.consecutive_refusals + 1 >= self.config.max_consecutive
        if go_back:
            reason = f"{reason}; {view.consecutive_refusals + 1} refused steps in a row (max_consecutive)"
        is_early = len(self.losses) < self.config.warmup_steps
        return Verdict(
            Action.ROLLBACK if go_back else Action.SKIP,
            reason=reason,
            evidence={"signal": signal, "value": value},
            if_state_is_bad=go_back,
            restart=is_early,
            expected_loss=self.losses.level() if len(self.losses) else None,
            # Numbers whose squares overflow come from broken data, not from a long tail.
            doubt=None if view.norm_overflow else Doubt.TRIAL,
        )

    def _suspicion(self, view: StepView) -> tuple[str, str, float] | None:
        """Why the step is suspect, by which signal, and its value."""
        if self.num_harmless >= PATIENCE or not math.isfinite(view.loss):
            return None
        loss, norm = view.loss, view.grad_norm
        if len(self.losses) < self.config.warmup_steps:
            limit = self.config.extreme * max((abs(value) for value in self.losses.values), default=math.inf)
            return (
                (f"loss {loss:.4g} during warm-up, more than {limit:.4g}", "loss", loss) if loss > limit > 0 else None
            )
        less_ready = 1.0 + self.num_harmless / PATIENCE
        if (high := self.losses.high(loss, self.config.z * less_ready)) is not None:
            level, deviations, count = high
            far = f"{deviations:.3g} deviations" if math.isfinite(deviations) else "far"
            in_a_row = "" if count == 1 else f" at least, {count} steps in a row,"
            return f"loss {loss:.4g} is{in_a_row} {far} above the usual {level:.4g}", "loss", loss
        if view.consecutive_refusals and len(self.losses) and self.losses.is_above(loss, 1.0):
            return (
                f"loss {loss:.4g} is above the usual {self.losses.level():.4g}, right after a refused step",
                "loss",
                loss,
            )
        for signal, value, recent, ratio in (
            ("grad_norm", norm, self.norms, self.config.grad_ratio),
            ("update", view.signals.get(f"{self.name}.update"), self.updates, self.config.update_ratio),
        ):
            if value is None or len(recent) < self.config.warmup_steps or not math.isfinite(value):
                continue
            if value > ratio * less_ready * recent.largest > 0.0:
                what = "gradient norm" if signal == "grad_norm" else "the update before, relative to the weights:"
                return (
                    f"{what} {value:.4g} is over {value / recent.largest:.3g} times the largest lately",
                    signal,
                    value,
                )
        return None

    def learn(self, view: StepView, decision: Decision) -> None:
        if not math.isfinite(view.loss):
            return
        self.num_harmless *= 1.0 - self.config.tried_per_1000 / 1000.0 / PATIENCE
        if view.consecutive_refusals >= self.config.accept_after:
            self.losses.clear()
            self.norms.clear()
        elif decision.was_tried(self.name) and not self.excursion.asks(view.loss):
            self.num_harmless += 1.0
            if not self.excursion and self.first is not None and self.losses.jumps(view.loss):
                self.excursion.begin(view.step, self.losses.level(), self.first)
        self.excursion.learn(view.loss)
        self.first = view.loss if self.first is None else self.first
        self.losses.add(view.loss)
        if math.isfinite(norm := view.grad_norm):
            self.norms.add(norm)
        if (update := view.signals.get(f"{self.name}.update")) is not None and math.isfinite(update):
            self.updates.add(update)

    def state_dict(self) -> dict[str, Any]:
        return {
            "usual": self.losses.state_dict(),
            "norms": list(self.norms),
            "updates": list(self.updates),
            "num_harmless": self.num_harmless,
            "first": self.first,
            "excursion": self.excursion.state_dict(),
            "last_update": None if self._size is None else self._size.of_last_update(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._size is not None:
            self._size.restore(state.get("last_update"))
        if "usual" not in state:  # of a version that knew shares of the first loss only
            return
        self.losses.load_state_dict(state["usual"])
        self.norms = Recent(self.config.window, state["norms"])
        self.updates = Recent(self.config.window, state["updates"])
        self.num_harmless = state["num_harmless"]
        self.first = state["first"]
        self.excursion.load_state_dict(state["excursion"])
