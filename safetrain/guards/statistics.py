"""The first steps of training: the loss and the norm of the weights at the start, and how they have changed since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.history import Smooth
from ..core.verdict import Action, Doubt, Verdict


@dataclass
class Beginning:
    """Numbers of committed steps only."""

    num_seen: int = 0
    start: float = math.inf
    best: float = math.inf
    smooth: Smooth = field(default_factory=lambda: Smooth(0.9))
    """Of the losses after the first."""
    start_size: float | None = None

    def learn(self, loss: float, size: float | None) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            self.start, self.start_size = loss, size
        elif self.smooth.add(loss) < self.best:
            self.best = self.smooth.mean

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_seen, self.start_size = state["num_seen"], state["start_size"]
        self.start, self.best = (math.inf if state[name] is None else state[name] for name in ("start", "best"))
        self.smooth = Smooth(0.9, *state["smooth"])


def raised(loss: float, share: float) -> float:
    """Above the loss by a share of it, whatever its sign."""
    return loss + share * abs(loss)
