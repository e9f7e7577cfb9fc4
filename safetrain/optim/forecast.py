"""The learning rates that a schedule will give, tried on a copy before the first step."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from ..core.numbers import amount
from .schedule import Schedule

MOST_STEPS = 5000
"""Steps of a schedule that are tried; about 10 µs each."""
TINY = 1e-3
"""Below this share of its peak a learning rate hardly moves the weights."""
EARLY = 0.5
"""Of the run: an ordinary decay reaches its lowest rate later than this."""


@dataclass(frozen=True)
class Forecast:
    rates: list[float]
    """The largest learning rate of all groups, before each step of the schedule."""
    error: str | None = None
    """What the scheduler raised after these."""

    @property
    def peak(self) -> float:
        return max(self.rates, default=0.0)

    def first_tiny(self) -> int | None:
        """The first step, after the peak so far, whose rate is a thousandth of it."""
        peak = 0.0
        for step, rate in enumerate(self.rates):
            peak = max(peak, rate)
            if rate < TINY * peak:
                return step
        return None

    def last_change(self) -> int:
        """The step after which the rate stays as it is."""
        last = len(self.rates) - 1
        while last > 0 and math.isclose(self.rates[last], self.rates[last - 1], rel_tol=1e-9):
            last -= 1
        return last

    def num_peaks(self) -> int:
        """How often the rate goes up and down again."""
        triples = zip(self.rates, self.rates[1:], self.rates[2:], strict=False)
        return sum(before < here >= after for before, here, after in triples)


def forecast(schedule: Schedule, num_steps: int) -> Forecast | None:
    """The rates of the next steps; None if the scheduler cannot be tried on a copy. Changes nothing."""
    scheduler = schedule.scheduler
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return None
    groups = [{**group, "params": [torch.zeros(1)]} for group in schedule.optimizer.param_groups]
    stand_in = SGD([torch.zeros(1)], lr=0.0)
    stand_in.param_groups[:] = copy.deepcopy(groups)
    rates: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stand-in makes no steps
        try:
            tried = copy.deepcopy(scheduler, {id(schedule.optimizer): stand_in})
            for _ in range(min(num_steps, MOST_STEPS)):
                rates.append(max(float(group["lr"] or 0.0) for group in stand_in.param_groups))
                tried.step()
        except Exception as error:
            return Forecast(rates, str(error)) if len(rates) > 1 else None
    return Forecast(rates)


@dataclass(frozen=True)
class Doubt:
    """What is odd about a schedule, and what to do."""

    reason: str
    fix: str
    is_fatal: bool = False
    """Most of the run would train with almost no learning rate."""


def doubt(schedule: Schedule, num_steps: int | None, num_epochs: int | None) -> Doubt | None:
    """What is odd about a schedule for a run of this many steps and epochs, as far as they are known."""
    if schedule.every == "epoch":
        return None if num_epochs is None else _too_slow(schedule, num_epochs)
    seen = forecast(schedule, MOST_STEPS if num_steps is None else num_steps)
    if seen is None or not seen.rates:
        return None
    name, total = type(schedule.scheduler).__name__, len(seen.rates) if num_steps is None else num_steps
    per_epoch = "step it once per epoch (scheduler.every: epoch in a config, scheduler_every='epoch' in Python), or give it steps"
    if seen.error is not None and num_steps is not None:
        return Doubt(
            f"{name} ends after {len(seen.rates)} of {num_steps} steps: {seen.error}", per_epoch, is_fatal=True
        )
    in_steps = f"{name} is stepped after every step, {total} times"
    tiny, last = seen.first_tiny(), seen.last_change()
    epochs = 0 if num_epochs is None or total < 3 * num_epochs else num_epochs
    if tiny is not None and tiny < EARLY * total and (_stays_tiny(seen, tiny) or tiny <= epochs):
        fall = f"the rate falls from {amount(seen.peak)} to {amount(seen.rates[tiny])} by step {tiny}"
        return Doubt(f"{in_steps}, and {fall}", per_epoch, is_fatal=True)
    if epochs > 1 and 0 < last <= epochs and seen.rates[-1] < seen.peak:
        return Doubt(
            f"{in_steps}, but changes the rate only in the first {last} of them, as if it counted epochs", per_epoch
        )
    if epochs > 1 and seen.num_peaks() > 2 * epochs:
        return Doubt(f"{in_steps}, and the rate goes up and down {seen.num_peaks()} times", per_epoch)
    if isinstance(schedule.scheduler, CosineAnnealingLR) and 2 * schedule.scheduler.T_max <= total:
        period = schedule.scheduler.T_max
        return Doubt(
            f"{in_steps}, and its T_max is {period}: after that the rate rises again, and goes on to swing", per_epoch
        )
    return None


def _stays_tiny(seen: Forecast, since: int) -> bool:
    peak = max(seen.rates[: since + 1])
    return all(rate < TINY * peak for rate in seen.rates[since:])


def _too_slow(schedule: Schedule, num_epochs: int) -> Doubt | None:
    """A decay made for steps that is stepped once per epoch."""
    seen, longer = forecast(schedule, num_epochs + 1), forecast(schedule, MOST_STEPS)
    if seen is None or longer is None or num_epochs < 2 or len(seen.rates) < 2:
        return None
    if seen.error is not None and len(seen.rates) < num_epochs:
        reason = (
            f"{type(schedule.scheduler).__name__} ends after {len(seen.rates)} of {num_epochs} epochs: {seen.error}"
        )
        return Doubt(reason, "make it for as many epochs as the run takes (loop.max_epochs)", is_fatal=True)
    start, end = seen.rates[0], seen.rates[-1]
    if start > 0 and abs(end - start) < 0.02 * start and min(longer.rates) < 0.5 * start:
        return Doubt(
            f"{type(schedule.scheduler).__name__} is stepped once per epoch, and changes the rate by less than 2% in {num_epochs} epochs",
            "make it for epochs, or step it after every step (scheduler.every: step)",
        )
    return None
