"""Refuses a step whose loss or gradient norm is far above those of the committed steps before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.history import Recent
from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Doubt, Verdict
from ..core.view import StepView
from .base import Guard


@dataclass
class SpikeConfig:
    z: float = option(6.0, gt=0.0)
    """Deviations above the median of the recent committed losses that make a spike."""
    log_z: float = option(4.0, ge=0.0)
    """… and deviations of the logarithms, where all recent losses are positive: single samples have losses with a long tail."""
    min_ratio: float = option(1.2, ge=1.0)
    """A spike is also this many times the median, and above every recent loss: small steady losses have tiny deviations."""
    of_start: float = option(0.5, ge=0.0)
    """A spike is also at least this share of the loss at the start of training: below it, a hard batch is just a hard batch."""
    grad_ratio: float = option(1000.0, gt=1.0)
    """A gradient norm this many times the median of the recent ones is a spike, whatever the loss says, if it is also above
    those of the first `warmup_steps`: towards the end norms are tiny, and one as large as at the start does no harm."""
    window: int = option(50, ge=10)
    """Committed steps that the statistics are taken over."""
    warmup_steps: int = option(25, ge=2)
    """Committed steps to watch before judging by statistics. Until then only a loss of `extreme` times the largest so far is a
    spike; in the first five steps, only if the last good batch has become as bad: the learning rate is too high then."""
    extreme: float = option(1000.0, gt=1.0)
    """See `warmup_steps`."""
    max_consecutive: int = option(5, ge=1)
    """Spikes in a row after which a rollback is asked for."""
    accept_after: int = option(60, ge=1)
    """Refusals in a row after which the new level is accepted: the data has changed, and going back did not help."""


class Spike(Guard):
    """Looks upward only, at finite values only (`finite` handles the others), and learns from committed steps only."""

    Config = SpikeConfig
    config: SpikeConfig

    def __init__(self, config: SpikeConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.losses = Recent(self.config.window)
        self.norms = Recent(self.config.window)
        self.start = self.start_norm = 0.0

    def judge(self, view: StepView) -> Verdict:
        reason = self._loss_spike(view.loss)
        signal, value = "loss", view.loss
        if reason is None and (reason := self._norm_spike(view.grad_norm)) is not None:
            signal, value = "grad_norm", view.grad_norm
        if reason is None:
            return COMMIT
        if view.consecutive_refusals >= self.config.accept_after:
            return Verdict(
                reason=f"{reason}; accepted as a new level after {view.consecutive_refusals} refusals in a row"
            )
        is_early = len(self.losses) < self.config.warmup_steps
        if go_back := view.consecutive_refusals + 1 >= self.config.max_consecutive:
            reason = f"{reason}; {view.consecutive_refusals + 1} refused steps in a row (max_consecutive)"
        return Verdict(
            Action.ROLLBACK if go_back else Action.SKIP,
            reason=reason,
            evidence={"signal": signal, "value": value},
            if_state_is_bad=go_back,
            restart=is_early,
            expected_loss=self.losses.center,
            # The first few losses say little about what is usual.
            doubt=Doubt.LAST_GOOD_BATCH if len(self.losses) < 5 else None,
        )

    def _loss_spike(self, loss: float) -> str | None:
        if not math.isfinite(loss) or not self.losses or loss <= self.losses.largest:
            return None  # nearly every step ends here, before anything is sorted
        if len(self.losses) < self.config.warmup_steps:
            limit = self.config.extreme * max(abs(value) for value in self.losses)
            return f"loss {loss:.4g} during warm-up, more than {limit:.4g}" if loss > limit > 0 else None
        center, spread = self.losses.center, self.losses.spread
        limit = max(
            center + self.config.z * spread,
            center + (self.config.min_ratio - 1.0) * abs(center),
            self.config.of_start * self.start,
        )
        if loss <= limit or self._is_in_tail(loss):
            return None
        z = f"{(loss - center) / spread:.3g} deviations" if spread > 0 else "far"
        return f"loss {loss:.4g} is {z} above the usual {center:.4g}"

    def _is_in_tail(self, loss: float) -> bool:
        if min(self.losses) <= 0.0:
            return False
        logs = Recent(len(self.losses), map(math.log, self.losses))
        return math.log(loss) <= logs.center + self.config.log_z * logs.spread

    def _norm_spike(self, norm: float) -> str | None:
        if not math.isfinite(norm) or len(self.norms) < self.config.warmup_steps or norm <= self.norms.largest:
            return None
        limit = max(self.config.grad_ratio * self.norms.center, self.start_norm)
        if not norm > limit > 0:
            return None
        return f"gradient norm {norm:.4g} is over {self.config.grad_ratio:g} times the usual {self.norms.center:.4g}"

    def learn(self, view: StepView, decision: Decision) -> None:
        if view.consecutive_refusals >= self.config.accept_after:
            self.losses.clear()
            self.norms.clear()
        if not self.losses and not self.start:
            self.start = abs(view.loss)
        self.losses.add(view.loss)
        norm = min(view.grad_norm, view.limits.norm)
        if math.isfinite(norm) and len(self.norms) < self.config.warmup_steps:
            self.start_norm = max(self.start_norm, norm)
        self.norms.add(norm)

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "start": self.start,
            "start_norm": self.start_norm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = Recent(self.config.window, state["losses"])
        self.norms = Recent(self.config.window, state["norms"])
        self.start, self.start_norm = state["start"], state["start_norm"]
