"""What was good recently: to tell a bad batch from a bad state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.history import Recent, Smooth


class LastGood:
    """The window committed last, one committed some steps before, and the losses of the steps committed recently.

    The newest window is not enough: an update that ruins the state for other data still lowers the loss of its own window.
    """

    MEMORY = 20

    def __init__(self) -> None:
        self.window: Sequence[Any] = ()
        self.earlier: Sequence[Any] = ()
        """Committed `MEMORY` / 2 to `MEMORY` steps ago, as soon as there is one."""
        self._next: Sequence[Any] = ()
        self._num_steps = 0
        self._losses = Recent(self.MEMORY)
        self._first: float | None = None
        self._lowest = math.inf
        self._early = Smooth(1.0)
        """Mean of the first `MEMORY` losses."""
        self._best_mean = math.inf
        """The lowest mean over the last `MEMORY` losses."""

    def forget(self) -> None:
        """After a rollback, recent windows say nothing about this state."""
        self.window = self.earlier = self._next = ()
        self._losses.clear()

    def committed(self, window: Sequence[Any], loss: float) -> None:
        if self._num_steps % (self.MEMORY // 2) == 0:
            self.earlier, self._next = self._next, self.window
        self._num_steps += 1
        self.window = window
        self._losses.add(loss)
        self._lowest = min(self._lowest, loss)
        if self._early.count < self.MEMORY:
            self._early.add(loss)
        if len(self._losses) == self.MEMORY:
            self._best_mean = min(self._best_mean, sum(self._losses) / self.MEMORY)
        if self._first is None:
            self._first = loss

    def is_as_good(self, loss: float) -> bool:
        """Whether the loss of a window now is within what was usual recently; never for NaN."""
        usual = self._losses.largest
        return loss <= usual + 0.5 * abs(usual) + 1e-6

    @property
    def nothing_learned(self) -> bool:
        """No committed step had a lower loss than the first."""
        return self._first is not None and self._lowest >= self._first

    @property
    def hardly_learned(self) -> bool:
        """The mean of recent losses was never clearly below that of the first ones."""
        return self._first is None or self.nothing_learned or self._best_mean > 0.6 * self._early.mean > 0

    def state_dict(self) -> list[Any] | None:
        """Without the windows: after a resume there is no good batch until a step is committed."""
        return (
            None
            if self._first is None
            else [self._first, self._lowest, list(self._losses), self._early.mean, self._early.count, self._best_mean]
        )

    def load_state_dict(self, state: list[Any] | None) -> None:
        if state is not None:
            self._first, self._lowest, losses, *means = state
            if means:  # earlier versions have not saved them
                mean, count, self._best_mean = means
                self._early = Smooth(1.0, mean, count)
            self._losses = Recent(self.MEMORY, losses)
