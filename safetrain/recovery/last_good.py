"""What was good lately: to tell a bad batch from a bad state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.history import Recent


class LastGood:
    """The window committed last, one committed some steps before, and the losses of the steps committed lately.

    The newest alone would not do: the update that spoils the state for everything else is made to lower its loss.
    """

    MEMORY = 20

    def __init__(self, window: Sequence[Any], loss: float) -> None:
        self.window: Sequence[Any] = window
        self.earlier: Sequence[Any] = ()
        """Committed `MEMORY` / 2 to `MEMORY` steps ago, as soon as there is one."""
        self._next: Sequence[Any] = ()
        self._num_steps = 0
        self.losses = Recent(self.MEMORY, [loss])
        self.first = self.lowest = loss

    @classmethod
    def resumed(cls, first: float, lowest: float, losses: Sequence[float]) -> LastGood:
        good = cls((), first)
        good.lowest = lowest
        good.losses = Recent(cls.MEMORY, losses)
        return good

    def forget(self) -> None:
        """The run went back: what was good lately is no longer of this state."""
        self.window = self.earlier = self._next = ()
        self.losses.clear()

    def followed_by(self, window: Sequence[Any], loss: float) -> LastGood:
        if self._num_steps % (self.MEMORY // 2) == 0:
            self.earlier, self._next = self._next, self.window
        self._num_steps += 1
        self.window = window
        self.losses.add(loss)
        self.lowest = min(self.lowest, loss)
        return self

    def is_as_good(self, loss: float) -> bool:
        """Whether the loss of a window now is within what was usual lately; never for NaN."""
        usual = self.losses.largest
        return loss <= usual + 0.5 * abs(usual) + 1e-6

    @property
    def nothing_learned(self) -> bool:
        """No committed step had a lower loss than the first."""
        return self.lowest >= self.first
