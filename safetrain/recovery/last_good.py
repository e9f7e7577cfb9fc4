"""Recent good batches: to tell a bad batch from a bad state, and a harmful update from one that only looks odd."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..core.history import Recent, Smooth
from ..tensors.nest import num_bytes

NUM_RECENT = 8
"""Windows kept to try branches on."""
RECENT_BYTES = 128 * 2**20
"""Fewer are kept if they are larger than this together."""


class LastGood:
    """The windows committed last, one committed some steps before, and the losses of the steps committed recently.

    The newest window is not enough: an update that ruins the state for other data still lowers the loss of its own window.
    """

    MEMORY = 20
    USUAL = 50
    """Losses that say how far a batch's loss may be from another's."""

    UPDATES = 200

    def __init__(self) -> None:
        self._recent: deque[tuple[Sequence[Any], float]] = deque(maxlen=NUM_RECENT)
        """Windows with their loss when they were committed; the newest last."""
        self._earlier: tuple[Sequence[Any], float] = ((), math.nan)
        """Committed `MEMORY` / 2 to `MEMORY` steps ago, as soon as there is one."""
        self._next: tuple[Sequence[Any], float] = ((), math.nan)
        self._hardest: list[tuple[Sequence[Any], float]] = [((), -math.inf), ((), -math.inf)]
        """The window with the largest loss of the last `USUAL` steps or so, and of as many before. What is rare is in them."""
        self._before_trouble: tuple[int, list[Sequence[Any]]] = (-1, [])
        """The step at which trouble may have begun, and the windows that were good before."""
        self._num_steps = 0
        self._losses = Recent(self.USUAL)
        self._updates = Recent(self.UPDATES)
        self.rates: Sequence[float] = ()
        """The learning rates of the newest committed step."""
        self._first: float | None = None
        self._lowest = math.inf
        self._early = Smooth(1.0)
        """Mean of the first `MEMORY` losses."""
        self._best_mean = math.inf
        """The lowest mean over the last `MEMORY` losses."""

    @property
    def window(self) -> Sequence[Any]:
        return self._recent[-1][0] if self._recent else ()

    @property
    def earlier(self) -> Sequence[Any]:
        return self._earlier[0]

    def remembered(self) -> list[tuple[Sequence[Any], float, str]]:
        """The newest window and one from some steps ago, as far as there are any: with their loss then, and in words."""
        found = [(*self._recent[-1], "the last good batch")] if self._recent else []
        if self._earlier[0]:
            found.append((*self._earlier, "a good batch from a few steps ago"))
        return found

    def judged(self) -> list[Sequence[Any]]:
        """Windows that a state must be better on, every one of them, to be the better one: new, old, and hard."""
        hardest = max(self._hardest, key=lambda found: found[1])[0]
        return [window for window in (*(w for w, _, _ in self.remembered()), hardest) if window]

    def note_suspect(self, step: int) -> None:
        """Keep the windows of now: trouble may begin with this step. Those of a suspect shortly before stay."""
        if step > self._before_trouble[0] + self.USUAL or self._before_trouble[0] < 0:
            self._before_trouble = step, [*(window for window, _, _ in self.remembered()), *self.recent()[:-1]]

    def before(self, step: int) -> list[Sequence[Any]]:
        """Windows that were good before the trouble of that step began; none if they were not kept."""
        noted, windows = self._before_trouble
        return windows if abs(noted - step) <= 1 else []

    def update_growth(self, num_steps: int) -> float:
        """How many times as large the updates are now as they were so many steps ago; 1 if it is not known."""
        updates = list(self._updates)
        now, then = updates[-10:], updates[: max(len(updates) - num_steps, 0)][-10:]
        if len(then) < 5 or not statistics.median(then) > 0.0:
            return 1.0
        return statistics.median(now) / statistics.median(then)

    def is_above_start(self, loss: float) -> bool:
        """Clearly worse than before anything was learned."""
        return self._first is not None and not loss <= self._first + max(0.25 * abs(self._first), 6.0 * self._spread())

    def recent(self) -> list[Sequence[Any]]:
        """The newest windows in their order."""
        return [window for window, _ in self._recent]

    def forget(self) -> None:
        """After a rollback, recent windows say nothing about this state."""
        self._recent.clear()
        self._earlier = self._next = ((), math.nan)
        self._hardest = [((), -math.inf), ((), -math.inf)]
        self._before_trouble = (-1, [])
        self._losses.clear()
        self._updates.clear()

    def committed(self, window: Sequence[Any], loss: float, update_size: float | None = None) -> None:
        """A step was committed; its window is empty if its loss cannot be computed again."""
        if self._num_steps % self.USUAL == 0:
            self._hardest = [((), -math.inf), self._hardest[0]]
        if window and loss > self._hardest[0][1]:
            self._hardest[0] = window, loss
        if update_size is not None:
            self._updates.add(update_size)
        if self._num_steps % (self.MEMORY // 2) == 0:
            self._earlier, self._next = self._next, self._recent[-1] if self._recent else ((), math.nan)
            room = max(2, min(NUM_RECENT, RECENT_BYTES // max(num_bytes(window), 1)))
            if room != self._recent.maxlen:
                self._recent = deque(self._recent, maxlen=room)
        self._num_steps += 1
        if window:
            self._recent.append((window, loss))
        self._losses.add(loss)
        self._lowest = min(self._lowest, loss)
        if self._early.count < self.MEMORY:
            self._early.add(loss)
        if len(self._losses) >= self.MEMORY:
            self._best_mean = min(self._best_mean, sum(list(self._losses)[-self.MEMORY :]) / self.MEMORY)
        if self._first is None:
            self._first = loss

    def is_as_good(self, loss: float) -> bool:
        """Whether the loss of a window now is within what was usual recently; never for NaN."""
        usual = max(list(self._losses)[-self.MEMORY :], default=-math.inf)
        return loss <= usual + 0.5 * abs(usual) + 1e-6

    def is_clearly_worse(self, loss: float, than: float, beyond_usual: bool = True) -> bool:
        """A window's loss now against what it was in another state: more than batches differ from each other, and, `beyond_usual`,
        more than nearly all had lately. True for NaN."""
        limit = than + max(0.1 * abs(than), (3.0 if beyond_usual else 1.0) * self._spread(), 1e-6)
        if beyond_usual and self._losses:
            limit = max(limit, sorted(self._losses)[int(0.9 * (len(self._losses) - 1))])
        return not loss <= limit

    def _spread(self) -> float:
        """Robust deviation of a loss, from neighbours, so that a trend does not count."""
        losses = list(self._losses)
        differences = [abs(after - before) for before, after in itertools.pairwise(losses)]
        return 1.4826 * statistics.median(differences) / math.sqrt(2.0) if differences else 0.0

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
            self._losses = Recent(self.USUAL, losses)
