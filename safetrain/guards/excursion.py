"""A stretch of steps with a high loss: different data arrived, and by the time it is over it may have undone what was
learned."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from ..core.verdict import Action, Doubt, Verdict

SHORTEST, LONGEST = 4, 64
"""Committed steps: a single odd batch is no stretch, and a long one is another phase of training."""
LOOKS = (8, 16, 24, 32, 48, LONGEST)
"""Steps into the stretch after which it is looked whether the earlier data are back: the loss alone may not show it."""


class Excursion:
    """Asks to go back to before it once the earlier data are back, if what came meanwhile has undone what was learned from them."""

    def __init__(self) -> None:
        self._end()

    def _end(self) -> None:
        self.start, self.level, self.first = -1, 0.0, 0.0
        self.losses: list[float] = []

    def __bool__(self) -> bool:
        return self.start >= 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Excursion) and self.state_dict() == other.state_dict()

    __hash__ = None  # type: ignore[assignment]

    def begin(self, step: int, level: float, first: float) -> None:
        """`level`: the usual loss before it. `first`: that of the run's first step."""
        self.start, self.level, self.first = step, level, first

    def asks(self, loss: float) -> bool:
        """Whether to look with this step if it is over."""
        return self.contradicts and (self.ends_with(loss) or len(self.losses) in LOOKS)

    @property
    def contradicts(self) -> bool:
        """The model does clearly worse on these data than an untrained one: they contradict what it has learned. After a single odd
        batch (a rare reward, say) the loss falls at once to what that batch has changed, and this is no stretch of other data."""
        early = self.losses[:3]
        if len(early) < 3 or min(early) - self.level < 0.2 * (max(early) - self.level):
            return False
        return statistics.median(early) > self.first + max(0.1 * abs(self.first), 1e-6)

    def ends_with(self, loss: float) -> bool:
        """The loss has come down at once, from where the stretch has been to less than half of that. A new task is learned by and by."""
        if len(self.losses) < SHORTEST:
            return False
        height = statistics.median(self.losses[-3:]) - self.level
        tallest = statistics.median(self.losses[:3]) - self.level
        return height > 0.3 * tallest > 0.0 and loss < self.level + 0.5 * height

    def verdict(self, loss: float) -> Verdict:
        reason = f"the loss was {statistics.mean(self.losses):.4g} for {len(self.losses)} steps, suddenly, instead of the usual {self.level:.4g}"
        evidence = {"signal": "loss", "value": loss}
        return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence, doubt=Doubt.BRANCHES, since=self.start)

    def learn(self, loss: float) -> None:
        """Of a committed step."""
        if not self:
            return
        if self.ends_with(loss) or len(self.losses) > LONGEST or not loss > self.level:
            self._end()
        else:
            self.losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "level": self.level, "first": self.first, "losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start, self.level, self.first = state["start"], state["level"], state["first"]
        self.losses = list(state["losses"])
