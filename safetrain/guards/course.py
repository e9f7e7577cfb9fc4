"""Trends over a run, in plain numbers: a schedule that has ended too early, a loss no better than that of a constant
prediction, or one that jumps up and down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.history import Recent, Smooth
from ..core.verdict import Finding

EARLY = 40
EVERY = 40
TINY = 1e-3
"""Relative change of the weights over a whole run that is no training."""
FEW = 50
"""A run of fewer steps is a test."""
SWINGS = 24
"""Committed steps over which a loss is looked at for jumps."""


FIRST_UPDATES = 8
"""Steps at the start whose update is not known yet, or grows out of a warm-up."""


@dataclass
class Course:
    """Numbers of committed steps only."""

    num_seen: int = 0
    highest_lr: float = 0.0
    num_ended: int = 0
    """Steps in a row whose learning rate is practically zero."""
    constant: Smooth = field(default_factory=lambda: Smooth(1.0))
    """Mean loss of the best answer that is the same for every sample."""
    smooth: Smooth = field(default_factory=lambda: Smooth(0.98))
    lowest: float = math.inf
    """Of the smoothed loss."""
    first: Smooth = field(default_factory=lambda: Smooth(1.0))
    """Mean of the first `EARLY` losses."""
    losses: Recent = field(default_factory=lambda: Recent(SWINGS))
    start: float | None = None
    num_tiny: int = 0
    """Steps in a row whose update is practically nothing, at a rate that was not below the last one's."""
    tiny: float = 0.0
    last_lr: float = 0.0
    last_rise: int = 0
    """The step at which the learning rate rose last."""
    levels: Recent = field(default_factory=lambda: Recent(3))
    """The smoothed loss, every `EVERY` steps."""

    @property
    def is_falling(self) -> bool:
        """By a fiftieth in the last hundred steps: it may fall further."""
        return len(self.levels) == 3 and self.smooth.mean < 0.98 * self.levels[0]

    @property
    def is_quiet(self) -> bool:
        """Nothing is being counted. What takes many steps to be seen is looked for every eighth."""
        return self.num_seen % 8 != 0 and self.num_tiny == 0 and self.num_ended == 0

    def learn(self, loss: float, lr: float, update_size: float | None = None, total_steps: int | None = None) -> None:
        """`update_size`: of the update before this step, relative to the weights."""
        self.num_seen += 1
        if update_size is not None and self.last_lr > 0 and total_steps is not None:
            is_tiny = 0 < update_size < TINY / total_steps and lr <= self.last_lr  # no warm-up
            self.num_tiny, self.tiny = (self.num_tiny + 1, update_size) if is_tiny else (0, 0.0)
        if lr > self.last_lr:
            self.last_rise = self.num_seen
        self.last_lr = lr
        self.start = loss if self.start is None else self.start
        self.highest_lr = max(self.highest_lr, lr)
        self.num_ended = self.num_ended + 1 if self.highest_lr > 0 and lr <= 1e-6 * self.highest_lr else 0
        if math.isfinite(loss):
            self.losses.append(loss)
            if self.num_seen <= EARLY:
                self.first.add(loss)
            elif self.smooth.add(loss) < self.lowest and self.smooth.count >= EARLY:
                self.lowest = self.smooth.mean
            if self.smooth.count and self.num_seen % EVERY == 0:
                self.levels.append(self.smooth.mean)

    def ended_schedule(self, total_steps: int | None, lr: float) -> Finding | None:
        if self.num_ended < 3 or total_steps is None or total_steps - self.num_seen < max(5, total_steps // 10):
            return None
        text = (
            f"the learning rate fell from {self.highest_lr:.3g} to {lr:.3g}, and {total_steps - self.num_seen} of {total_steps} "
            "steps are still to come"
        )
        return Finding("schedule_ended", text)

    def no_progress(self, after: int | None, total_steps: int | None, is_whole: bool = True) -> Finding | None:
        """Judged by the targets of some batches, so with some room. `is_whole`: the loss has no terms but the one whose constant answer
        is known."""
        if after is None or self.constant.mean <= 0:
            return None
        after = after if total_steps is None else min(after, max(200, total_steps // 2))
        if self.num_seen < after or self.num_seen - self.last_rise < after // 2 or self.is_falling:
            return None
        constant, loss = self.constant.mean, self.smooth.mean
        if self.lowest < 0.95 * constant and (not is_whole or loss < 0.99 * self.first.mean or loss < 0.5 * constant):
            return None
        if not is_whole and (loss < 0.9 * self.first.mean or self.first.mean > 1.5 * constant):
            return None  # what is added to it may be what is left
        text = (
            f"after {self.num_seen} steps the loss is {loss:.4g}, at first it was {self.first.mean:.4g}; the same answer for every "
            f"sample would give about {constant:.4g}"
        )
        return Finding("no_progress", text)

    def is_above_constant(self, after: int) -> bool:
        """After that many steps the loss is no better than that of a constant answer."""
        known = self.num_seen >= after and self.constant.mean > 0 and self.smooth.count > 0
        return known and min(self.lowest, self.smooth.mean) > 0.95 * self.constant.mean

    def too_slow(self, total_steps: int | None) -> Finding | None:
        """The updates are so small that all steps of the run together do not change the weights."""
        if self.num_tiny < 3 or self.has_moved or total_steps is None or total_steps < FEW:
            return None
        text = (
            f"an update changes the weights by {self.tiny:.1e} of their size at a learning rate of {self.highest_lr:.3g}: "
            f"{total_steps} steps change them by less than {TINY:g} of it"
        )
        return Finding("rate_too_low", text)

    @property
    def has_moved(self) -> bool:
        """Updates were larger at first: what is tiny by now is the gradient of a loss that is nearly flat, or a schedule's end."""
        return self.num_tiny < self.num_seen - FIRST_UPDATES

    @property
    def has_learned(self) -> bool:
        """Recent losses are well below the first ones."""
        return self.smooth.count > 0 and self.smooth.mean < 0.6 * self.first.mean

    @property
    def starts_far_above_constant(self) -> bool:
        return self.start is not None and 0 < 10 * self.constant.mean < self.start

    def is_hopeless(self, total_steps: int | None, after: int) -> bool:
        is_slow = self.num_tiny >= after and not self.has_moved and total_steps is not None and total_steps >= FEW
        return is_slow and self.tiny < 0.5 * TINY / (total_steps or 1)

    def oscillation(self) -> Finding | None:
        """Up and down in turn, by more than the level itself, and no lower than at the start: noise does not keep such a beat."""
        if self.num_seen % 8 or len(self.losses) < SWINGS or self.start is None:
            return None
        losses = list(self.losses)
        changes = [after - before for before, after in itertools.pairwise(losses)]
        turns = sum(one * other < 0 for one, other in itertools.pairwise(changes))
        level = sum(losses) / len(losses)
        size = sum(map(abs, changes)) / len(changes)
        if turns < len(changes) - 2 or size <= 0.5 * abs(level) or level < abs(self.start):
            return None
        return Finding("oscillation", f"the loss goes up and down in every step, by {size:.3g} around {level:.3g}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_seen": self.num_seen,
            "highest_lr": self.highest_lr,
            "num_ended": self.num_ended,
            "first": [self.first.mean, self.first.count],
            "constant": [self.constant.mean, self.constant.count],
            "smooth": [self.smooth.mean, self.smooth.count],
            "lowest": None if math.isinf(self.lowest) else self.lowest,
            "losses": list(self.losses),
            "start": self.start,
            "levels": list(self.levels),
            "last_rise": self.last_rise,
            "last_lr": self.last_lr,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ("num_seen", "highest_lr", "num_ended", "start"):
            setattr(self, name, state[name])
        self.smooth, self.constant = Smooth(0.98, *state["smooth"]), Smooth(1.0, *state["constant"])
        self.first = Smooth(1.0, *state["first"])
        self.levels = Recent(3, state.get("levels", ()))  # earlier versions have not saved these
        self.last_rise, self.last_lr = state.get("last_rise", 0), state.get("last_lr", 0.0)
        self.lowest = math.inf if state["lowest"] is None else state["lowest"]
        self.losses = Recent(SWINGS, state["losses"])
