"""The first steps of training: the loss and the norm of the weights at the start, and how they have changed since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.history import Smooth
from ..core.verdict import Action, Doubt, Verdict

LARGE, USUAL = 0.25, 0.06
"""Size of an update relative to the weights that training began with: one that changes most of what they are, and a brisk one."""
LOOKS = 4
"""A rate that looks too high is tried against a lower one after `early_steps`, and once more after this many times `early_steps`."""


@dataclass
class Beginning:
    """Numbers of committed steps only."""

    num_seen: int = 0
    start: float = math.inf
    best: float = math.inf
    smooth: Smooth = field(default_factory=lambda: Smooth(0.9))
    """Of the losses after the first."""
    start_size: float | None = None
    size_per_rate: float | None = None
    """Of the first update: its size relative to the weights that training began with, over the learning rate."""
    last_rate: float = 0.0

    def learn(self, loss: float, size: float | None, update: float | None, rate: float) -> None:
        """`update`: the size of the update before, relative to the weights after it. `rate`: that of this step."""
        self.num_seen += 1
        if self.size_per_rate is None:
            if update and self.last_rate > 0.0:
                # The weights after it are larger, because it is about at right angles to them.
                self.size_per_rate = update / math.sqrt(max(1.0 - update * update, 1e-4)) / self.last_rate
            self.last_rate = rate
        if self.num_seen == 1:
            self.start, self.start_size = loss, size
        elif self.smooth.add(loss) < self.best:
            self.best = self.smooth.mean

    def moved_too_far(self, after: int | None, rate: float) -> Verdict | None:
        """At this rate an update is about as large as the weights were. That may be meant, and is tried: a short run from the start
        at a rate that is brisk, too."""
        if after is None or self.size_per_rate is None or self.num_seen not in (after - 1, LOOKS * after - 1):
            return None
        size = self.size_per_rate * rate
        if not size > LARGE:
            return None
        reason = (
            f"at this learning rate an update moves the weights that training began with by {size:.2g} times their size"
        )
        evidence = {"signal": "update", "value": size}
        share = max(USUAL / size, 0.01)
        return Verdict(
            Action.ROLLBACK, reason=reason, evidence=evidence, restart=True, doubt=Doubt.LOWER_RATE, lr_share=share
        )

    def rose_from_start(self, after: int | None, rise: float, size: float | None) -> Verdict | None:
        """The loss is above its start and the norm of the weights has grown by half. After a first batch that was easy by
        chance the loss rises too, so the step is tried with the weights of the start before training is restarted."""
        if self.num_seen != after or self.start_size is None or size is None:
            return None
        if self.smooth.mean <= raised(self.start, rise) or size <= 1.5 * self.start_size:
            return None
        reason = (
            f"the first {self.num_seen} steps raised the loss from {self.start:.4g} to a mean of {self.smooth.mean:.4g}"
        )
        # With a slow warm-up the weights of the start are about as good.
        return self._restart(reason, Doubt.SINCE_START, margin=0.02)

    def never_improved(self, after: int, rise: float) -> Verdict | None:
        """The loss was never below its start, and is far above it. Confirmed by short runs from the start."""
        if self.num_seen != after or self.best < self.start or self.smooth.mean <= raised(self.start, rise):
            return None
        return self._restart(
            f"after {self.num_seen} steps the loss ({self.smooth.mean:.4g}) was never below its start ({self.start:.4g})",
            Doubt.BRANCHES,
        )

    def _restart(self, reason: str, doubt: Doubt, margin: float = 0.0) -> Verdict:
        """`margin`: by which share the loss must be above that of the start in the same step to confirm it."""
        return Verdict(
            Action.ROLLBACK,
            reason=reason,
            evidence={"signal": "loss", "value": self.smooth.mean},
            restart=True,
            doubt=doubt,
            doubt_margin=margin,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_seen": self.num_seen,
            "start": self.start if self.num_seen else None,
            "best": self.best if math.isfinite(self.best) else None,
            "smooth": [self.smooth.mean, self.smooth.count],
            "start_size": self.start_size,
            "size_per_rate": self.size_per_rate,
            "last_rate": self.last_rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_seen, self.start_size = state["num_seen"], state["start_size"]
        self.size_per_rate, self.last_rate = state.get("size_per_rate"), state.get("last_rate", 0.0)
        self.start, self.best = (math.inf if state[name] is None else state[name] for name in ("start", "best"))
        self.smooth = Smooth(0.9, *state["smooth"])


def raised(loss: float, share: float) -> float:
    """Above the loss by a share of it, whatever its sign."""
    return loss + share * abs(loss)
