"""Tries a suspicious step before refusing it: is the update, or the state of the weights, really worse on batches that
were good?

Refusing a step that only looks odd (a hard batch, a new task, a rare and informative sample) is harm, so a suspicion is no more than a
reason to look. A trial ends with everything as it was, bit for bit, except that an update that passes is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint.copies import Copy
from ..checkpoint.policy import CheckpointPolicy
from ..checkpoint.state import TrainState
from ..core.verdict import Action, Decision, Doubt
from ..core.view import StepView
from ..optim.forecast import forecast
from ..step.step import Outcome, Step
from ..tensors.nest import copied
from ..tensors.rng import undisturbed_rng
from .last_good import LastGood
from .refused_step import RefusedStep

STEPS = 16
"""Longest branch. A shorter one takes as many steps as would be undone."""
GROWN = 3.0
"""Updates that are this many times as large as before the trouble: then lower rates are tried too."""
RATES = (1.0, 0.3, 0.1)
"""Shares of the learning rate that going back is tried with."""
RESTART_RATES = (1.0, 0.1, 0.01)
DRIFT = 0.3
"""Going back is of no use if the loss then rises again, by more than this share of what it rose by until now, per step."""
FURTHER, LOWER = 1.1, 0.05
"""A lower rate from the start must lower the loss by this factor more than the run has, to a loss that is lower by this share."""
COMING = 2000
"""Steps of the schedule in which a warm-up that has not ended reaches its peak."""
REST = 300
"""Steps after a comparison of branches that found nothing until the next one; twice as many each time."""
ALLOWANCE, SHARE = 2 * STEPS, 0.005
"""Steps of branches that may be spent on finding nothing: some at once, and a share of all steps."""
ALTERNATING = 1000
"""Steps in which a stretch of other data is undone once at most."""


@dataclass(frozen=True)
class Branch:
    """Losses of the judged windows before and after some steps from a state."""

    rate: float
    begin: Sequence[float]
    end: Sequence[float]


class Trials:
    def __init__(self, step: Step, checkpoints: CheckpointPolicy, last_good: LastGood) -> None:
        self._step, self._checkpoints, self.last_good = step, checkpoints, last_good
        self.num_passed = self.num_convicted = 0
        self._num_fruitless = self._num_helpless = self._spent = 0
        self._next_branches = 0
        """Branches are not compared before this step."""
        self._next_since = 0
        """Nothing is undone before this step because the data were others for a while: they may be meant to alternate."""
        self._has_said = False

    # ---- an update ---------------------------------------------------------------------------------------------

    def state_is_suspect(self, case: RefusedStep) -> str | None:
        """What shows that the weights are worse than they were when the remembered windows were committed; None if nothing does."""
        good = self.last_good
        for window, then, name in good.remembered():
            now = self.loss(case, [window])[0]
            if good.is_clearly_worse(now, then):
                return f"{name} is bad now too: its loss was {then:.4g} when it was committed, and is {now:.4g}"
        return None

    def update(
        self,
        case: RefusedStep,
        decision: Decision,
        is_suspect: bool = True,
        differs: Callable[[RefusedStep, StepView], bool] = lambda case, view: False,
    ) -> str | None:
        """Apply the update, unless the step `differs` when it is computed once more. Returns what it would have done to good windows if it `is_suspect` and they are clearly worse after it:
        it is then undone. None: it stays applied."""
        step = self._step
        windows = [window for window, _, _ in self.last_good.remembered()] if is_suspect else []
        before = self.loss(case, windows)
        start = Copy().take(TrainState.gather(step))
        step.transaction.rewind()
        measurement = step.attempt(case.window)
        view = step.view(measurement)
        if differs(case, view):
            step.undo(case.view.loss_scale)
            return "the step gives other numbers when it is computed once more"
        outcome = step.commit(measurement, view, decision)
        try:
            harm = self._harm(case, outcome, windows, before)
        except Exception:
            start.restore_training(step)
            step.transaction.expect_weights()
            raise
        if harm is None:
            self.num_passed += is_suspect
            if is_suspect:
                self.last_good.note_suspect(case.view.step)
            case.applied = view, decision, step.transaction.window_before(case.window)
            return None
        self.num_convicted += 1
        if outcome is Outcome.COMMITTED:
            start.restore_training(step)
            step.transaction.expect_weights()
        step.undo(case.view.loss_scale)
        return harm

    def _harm(self, case: RefusedStep, outcome: Outcome, windows: Sequence[Any], before: Sequence[float]) -> str | None:
        """What an update has done to good windows, whose losses are known from before it."""
        if outcome is Outcome.RUINED:
            return "it would have made the state non-finite"
        if outcome is not Outcome.COMMITTED or not windows:
            return None
        old, new = _mean(before), _mean(self.loss(case, windows))
        if not self.last_good.is_clearly_worse(new, old):
            return None
        count = "a good batch" if len(windows) == 1 else f"{len(windows)} good batches"
        return f"committed it would have raised the loss of {count} from {old:.4g} to {new:.4g}"

    # ---- going back --------------------------------------------------------------------------------------------

    def going_back(self, case: RefusedStep, restart: bool = False) -> str | None:
        """Compare short runs on the same recent data: on from here, and from the snapshot that a rollback would go to, at several
        rates. Returns why going back is better, with `case.lr_share` set to the best rate; None if it is not, or cannot be tried."""
        step, good = self._step, self.last_good
        snapshot = self._checkpoints.snapshots.peek(restart, case.since)
        train, judged = good.recent(), good.judged()
        if case.since is not None:
            # Are the earlier data back? Then what came meanwhile does not count.
            train = good.before(case.since)
            judged = [*train[:2], case.window]
        if snapshot is None or not train or len(judged) < 2:
            return None
        too_soon = case.view.step < self._next_branches or self._spent > ALLOWANCE + SHARE * case.view.step
        if too_soon if case.since is None else case.view.step < self._next_since:
            return None
        num_since = case.num_committed - snapshot.state.rest["num_committed"]
        is_first = snapshot is self._checkpoints.snapshots.first
        if num_since <= 0 or (is_first and not (restart or case.since) and not good.is_above_start(case.view.loss)):
            return None
        length = min(num_since, STEPS)
        train = (train * length)[:length]
        now, today = Copy().take(TrainState.gather(step)), _Today(step)
        try:
            here = self.loss(case, judged)
            snapshot.state.restore_training(step)
            today.restore()
            there = self.loss(case, judged)
            if not self._is_worse(here, there, everywhere=case.since is not None):
                self._found_nothing(case)
                return None
            now.restore_training(step)
            on = self._branch(case, train, judged, 1.0)
            rates: tuple[float, ...] = RESTART_RATES if restart else RATES
            if case.since is not None or not (
                good.is_above_start(_mean(on.end)) or good.update_growth(num_since) > GROWN
            ):
                rates = rates[:1]  # whatever wanders wanders less at a lower rate, which shows nothing
            backs = []
            for rate in rates:
                snapshot.state.restore_training(step)
                today.restore()
                backs.append(self._branch(case, train, judged, rate))
        finally:
            now.restore_training(step)
            step.transaction.expect_weights()
            step.undo(case.view.loss_scale)
        useful = [back for back in backs if self._is_better(back, on, here, len(train) / num_since)]
        if case.since is not None:  # what was undone is clear already; it only must not be made good for at once
            useful = [back for back in backs if all(a < b for a, b in zip(back.end, on.end, strict=True))]
        if not useful:
            if self._is_worse(on.end, there):  # neither helps now, but the harm is real: look again soon
                self._num_helpless += 1
                if len(rates) > 1:
                    self._spent = 0
                self._next_branches = case.view.step + 2**self._num_helpless
            else:
                self._found_nothing(case)
            return None
        best = min(useful, key=lambda back: _mean(back.end) * (1.0 if back.rate == 1.0 else 1.05))
        case.lr_share = best.rate
        at = "" if best.rate == 1.0 else f" at {best.rate:g} of the learning rate"
        if case.since is not None:
            self._checkpoints.snapshots.distrust(case.since)
            self._next_since = case.view.step + ALTERNATING
        self.num_convicted += 1
        self._spent = self._num_helpless = 0  # that was well spent
        return (
            f"tried for {length} steps on the newest batches: going on ends at a loss of {_mean(on.end):.4g}, going back{at} at "
            f"{_mean(best.end):.4g}"
        )

    def lower_rate(self, case: RefusedStep) -> str | None:
        """Run from the start at a lower rate, over the older half of the newest windows, and compare on the others. Returns why that is
        better, with `case.lr_share` set; None if it is not. The run has trained on these too, so it is not easily found to be worse."""
        step, snapshot, windows = self._step, self._checkpoints.snapshots.first, self.last_good.recent()
        share = min(v.lr_share for v in case.decision.verdicts.values() if v.doubt is Doubt.LOWER_RATE)
        if snapshot is None or snapshot.state.rest["num_committed"] > 0 or len(windows) < 6:
            return None
        train, judged = windows[:-3], windows[-3:]
        length = min(case.num_committed, STEPS)
        now, today = Copy().take(TrainState.gather(step)), _Today(step)
        try:
            here = self.loss(case, judged)
            snapshot.state.restore_training(step)
            today.restore()
            back = self._branch(case, (train * length)[:length], judged, share)
        finally:
            now.restore_training(step)
            step.transaction.expect_weights()
            step.undo(case.view.loss_scale)
        start, now_at, there = _mean(back.begin), _mean(here), _mean(back.end)
        is_further = start - there > FURTHER * max(start - now_at, 0.0) and there < now_at - LOWER * abs(now_at)
        if not (is_further and all(b < a for a, b in zip(here, back.end, strict=True))):
            return None
        coming = forecast(step.schedule, COMING)
        rate = max(case.view.lrs)
        case.lr_share = share if coming is None or not coming.peak > rate else max(share * rate / coming.peak, 0.01)
        self.num_convicted += 1
        return (
            f"tried for {length} steps from the start: {share:.2g} of the learning rate ends at a loss of {there:.4g}, where the run "
            f"is at {now_at:.4g}"
        )

    def _is_better(self, back: Branch, on: Branch, here: Sequence[float], share: float) -> bool:
        """Not only for the moment: if the loss rises from there as it did, that is the way of this training, and no damage."""
        rise = _mean(here) - _mean(back.begin)
        return (
            self._is_worse(on.end, back.end) and _mean(back.end) - _mean(back.begin) <= DRIFT * back.rate * share * rise
        )

    def _is_worse(self, losses: Sequence[float], than: Sequence[float], everywhere: bool = False) -> bool:
        """All together and at least one of them (or each) clearly, and none is clearly better."""
        worse = [self.last_good.is_clearly_worse(a, b, False) for a, b in zip(losses, than, strict=True)]
        better = [self.last_good.is_clearly_worse(b, a, False) for a, b in zip(losses, than, strict=True)]
        if everywhere and not all(worse):
            return False
        together = self.last_good.is_clearly_worse(_mean(losses), _mean(than), False)
        return together and any(worse) and not any(b and not w for b, w in zip(better, worse, strict=True))

    def _found_nothing(self, case: RefusedStep) -> None:
        if case.since is not None:
            return  # a look costs two forward passes of three windows
        self.num_passed += 1
        self._next_branches = case.view.step + REST * 2**self._num_fruitless
        self._num_fruitless += 1

    def _branch(self, case: RefusedStep, train: Sequence[Any], judged: Sequence[Any], rate: float) -> Branch:
        step = self._step
        scale = min(rate, case.decision.lr_scale)
        begin = self.loss(case, judged)
        step.clear_gradients()  # of a step before that failed
        case.random_state.restore()
        self._spent += len(train)
        for window in train:
            step.transaction.expect_weights()
            measurement = step.attempt([copied(batch) for batch in window])
            view = step.view(measurement)
            if view.in_trouble:
                return Branch(rate, begin, [math.nan] * len(judged))
            if step.commit(measurement, view, Decision(Action.COMMIT, scale, {})) is Outcome.RUINED:
                return Branch(rate, begin, [math.nan] * len(judged))
        return Branch(rate, begin, self.loss(case, judged))

    # ---- losses ------------------------------------------------------------------------------------------------

    def loss(self, case: RefusedStep, windows: Sequence[Any]) -> list[float]:
        """Of each window, without gradients, with the random numbers of the suspect step; nothing that a forward writes stays."""
        losses = []
        for window in windows:
            with undisturbed_rng(), self._step.transaction.aside():
                case.random_state.restore()
                losses.append(mean_loss(self._step, window))
        return losses

    def remark(self) -> str | None:
        """Said once: suspects are harmless here."""
        if self._has_said or self.num_convicted or self.num_passed < 5:
            return None
        self._has_said = True
        return (
            f"{self.num_passed} suspicious steps were tried and did no harm to good batches: finite steps of this run are suspected less "
            "readily from now on (monitor_progress: false turns that off altogether)"
        )

    def state_dict(self) -> list[int]:
        counts = [self.num_passed, self.num_convicted, self._num_fruitless, self._next_branches, self._spent]
        return [*counts, self._num_helpless, self._next_since, int(self._has_said)]

    def load_state_dict(self, state: Sequence[int]) -> None:
        self.num_passed, self.num_convicted, self._num_fruitless, self._next_branches, self._spent = state[:5]
        self._num_helpless, self._next_since, self._has_said = state[5], state[6], bool(state[7])


class _Today:
    """The learning rates, and buffers of one element, as they are now: going back is tried with today's rate, and with today's weight of
    a part of the loss that a counter sets."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._counters = [(buffer, buffer.detach().clone()) for buffer in step.model.buffers() if buffer.numel() == 1]
        lrs = [group.get("lr") for group in step.optimizer.param_groups]
        self._lrs = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in lrs]

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, value in self._counters:
            buffer.copy_(value)
        for group, lr in zip(self._step.optimizer.param_groups, self._lrs, strict=False):
            if lr is None:
                continue
            if hasattr(group["lr"], "copy_"):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr


def _losses(step: Step, window: Sequence[Any], with_gradients: bool) -> list[torch.Tensor]:
    try:
        with undisturbed_rng(), torch.set_grad_enabled(with_gradients), step.exchange.alone(step), step.patches.scope:
            return [step.forward(copied(batch))[0].detach() for batch in window]
    except RuntimeError as error:
        if with_gradients or step.exchange.world_size > 1 or isinstance(error, torch.OutOfMemoryError):
            raise
    # A loss may need the gradient of something itself: a gradient penalty does. Who called undoes what the first pass wrote.
    return _losses(step, window, with_gradients=True)


def mean_loss(step: Step, window: Sequence[Any]) -> float:
    """Of a window, over all ranks, without gradients, at the present weights. NaN if a rank raises."""
    try:
        losses = _losses(step, window, with_gradients=False)
        loss = torch.stack([loss.float() for loss in losses]).mean()
    except Exception:
        if step.exchange.world_size == 1:
            raise
        # The other ranks wait for an answer.
        loss = torch.full((), math.nan, device=step.device)
    return float(step.exchange.mean(loss))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
