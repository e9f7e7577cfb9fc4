"""Checks that train for a few steps and then restore everything."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...core.numbers import amount, listed
from ...core.view import Limits, tightest
from ...tensors import gradients
from ...tensors.rng import RandomState
from ..outcome import Outcome, Unavailable, failed, passed, skipped, warned
from ..registry import preflight_check
from ..sample import Read
from ..subject import Subject
from .data import LARGE

SMALLER, LARGER = (0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6), (10.0, 100.0, 1e3, 1e4)
"""Factors of the learning rate, tried in this order if it is too high or too low, while there is time."""
LEARNS, LEARNS_NOTHING = 0.1, 0.02
"""Relative decrease of the loss from which on the model learns, and below which it learns nothing."""
DIVERGES, STANDS_STILL = -1.0, 0.001


@dataclass
class Trial:
    losses: list[float]
    before: float
    after: float
    """The mean loss over the batches, before and after."""
    weight_change: float
    """Relative to the size of the weights."""

    @property
    def diverged(self) -> bool:
        """A loss near zero may grow many-fold in a healthy training, so the weights must have changed a lot too."""
        return not math.isfinite(self.after) or (self.gain < DIVERGES and self.weight_change > 1.0)

    @property
    def gain(self) -> float:
        """The relative decrease of the loss; negative if it grew, -inf if it is not finite."""
        if not math.isfinite(self.after):
            return -math.inf
        return (self.before - self.after) / max(abs(self.before), 1e-12)


def _train(
    subject: Subject,
    optimizer: Optimizer,
    batches: Sequence[Read],
    num_steps: int,
    set_lr: Callable[[int], None] = lambda step: None,
    limits: Limits | None = None,
    enough: float = math.inf,
) -> Trial:
    """Train with the same random numbers in every step, so that the loss depends on the weights alone.

    Ends early when a loss is not finite, or has decreased by the share `enough`.
    """
    start = RandomState.capture()
    losses: list[float] = []
    before = _evaluate(subject, batches, start)
    for step in range(num_steps):
        start.restore()
        subject.clear_gradients()
        loss = subject.forward(batches[step % len(batches)].batch, autocast=False)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]) or (before - losses[-1]) / max(abs(before), 1e-12) > enough:
            break
        torch.autograd.backward(loss)
        set_lr(step)
        grads = gradients.collect(subject.trainer.stepper.parameters)
        if limits is not None and limits.bounded and grads:
            gradients.clip(
                subject.trainer.stepper.groups,
                subject.trainer.stepper.parameters,
                limits,
                gradients.global_norm(grads),
                None,
            )
        optimizer.step()
    return Trial(losses, before, _evaluate(subject, batches, start), subject.untouched.weight_change())


def _evaluate(subject: Subject, batches: Sequence[Read], start: RandomState) -> float:
    values = []
    for read in batches:
        start.restore()
        with torch.no_grad():
            values.append(float(subject.forward(read.batch, autocast=False)))
    return sum(values) / len(values)


def _num_steps(subject: Subject, share: float, at_most: int, at_least: int) -> int:
    """The number of steps that fit into a share of the budget."""
    each = max(subject.seconds_per_step * 1.3, 1e-4)
    if subject.budget.left < at_least * each:
        raise Unavailable(
            f"a step takes {amount(each)} s, and {at_least} of them do not fit into the budget; raise --budget"
        )
    return max(min(int(share * subject.budget.seconds / each), at_most), at_least)


@preflight_check(
    looks_at="whether the model can overfit one batch",
    fails="the loss falls by less than 2%",
    warns="by less than 10%",
    fix="match inputs and targets, use the model's output in the loss, train the parameters that matter",
)
def overfit_batch(subject: Subject) -> Outcome:
    """Whether the model can learn one batch. Uses an optimizer of its own, so that the learning rate does not matter."""
    batch = subject.healthy[:1]
    num_steps = _num_steps(subject, 0.1, 120, 10)
    parameters = [p for group in subject.trainer.optimizer.param_groups for p in group["params"] if p.requires_grad]
    trials: dict[float, Trial] = {}
    for lr in (3e-3, 3e-2, 3e-4):
        with subject.clean():
            trials[lr] = _train(subject, Adam(parameters, lr=lr), batch, num_steps, enough=0.5)
        if trials[lr].gain > LEARNS or subject.budget.spent > subject.budget.seconds:
            break
    best = max(trials.values(), key=lambda trial: trial.gain)
    numbers = {
        "before": best.before,
        "after": best.after,
        "num_steps": len(best.losses),
        "learning_rates": list(trials),
    }
    course = (
        f"the loss of one batch goes from {amount(best.before)} to {amount(best.after)} in {len(best.losses)} steps"
    )
    if best.gain < LEARNS_NOTHING:
        return failed(
            f"{course}: the model cannot even overfit one batch",
            f"{_unscaled(subject)}check that targets belong to their inputs and have the shape of the outputs, that the loss uses the model's output, "
            "that the output depends on the input, and that the parameters that matter are trained",
            **numbers,
        )
    if best.gain < LEARNS and num_steps >= 30:
        return warned(
            f"{course}, which is little",
            "check that the output depends on the input, that inputs and targets belong together, and that the model has enough "
            "capacity to tell samples apart",
            **numbers,
        )
    return passed(course, **numbers)


def _unscaled(subject: Subject) -> str:
    typical = {path: statistics.median(known.peaks) for path, known in subject.scan.fields.items() if known.peaks}
    large = [f"field {path!r} (values around {amount(size)})" for path, size in typical.items() if size > LARGE]
    return f"standardise {listed(large)} first; " if large else ""


# ---- the learning rate -------------------------------------------------------------------------------------------------


@preflight_check(
    looks_at="the schedule, and short trainings at the learning rate and at smaller and larger ones",
    fails="it diverges where a smaller one does not, is zero or negative, or the schedule ends before the run",
    warns="it hardly changes anything where a larger one does",
    fix="the learning rate that worked: `optimizer.lr=…`",
)
def learning_rate(subject: Subject) -> Outcome:
    """Short trainings with the configured optimizer: at its learning rate, and at smaller and larger ones."""
    groups = subject.trainer.optimizer.param_groups
    if not all("lr" in group for group in groups):
        return skipped(f"{type(subject.trainer.optimizer).__name__} has no learning rate")
    schedule = _schedule(subject)
    if isinstance(schedule, Outcome):
        return schedule
    first, peak = schedule[0], max(schedule, key=lambda lrs: lrs[0])
    if not all(math.isfinite(lr) and lr >= 0 for lrs in schedule for lr in lrs):
        return failed(
            f"the learning rate becomes {next(lr for lrs in schedule for lr in lrs if not (math.isfinite(lr) and lr >= 0))}",
            "correct optimizer.lr and the scheduler: a learning rate is a positive number",
        )
    if peak[0] == 0:
        return failed(
            "the learning rate is 0 in every step", "set optimizer.lr to a positive number, 1e-3 to begin with"
        )
    batches = subject.healthy
    trials = _range_test(subject, batches, first, peak)
    return _judge_range(subject, trials, peak[0])


def _range_test(
    subject: Subject, batches: Sequence[Read], first: Sequence[float], peak: Sequence[float]
) -> dict[float, Trial]:
    """Trials by factor: the learning rate itself, and others if it does not work."""
    num_steps = _num_steps(subject, 0.06, 20, 5)
    deadline = subject.budget.deadline(0.25)
    trials = {1.0: _at(subject, batches, num_steps, first, peak, 1.0)}
    own = trials[1.0]
    for factor in SMALLER if own.diverged else LARGER if abs(own.gain) < STANDS_STILL else ():
        if time.perf_counter() > deadline:
            break
        has_learned = any(trial.gain > LEARNS for trial in trials.values())
        trials[factor] = _at(subject, batches, num_steps, first, peak, factor)
        if has_learned or (trials[factor].gain > LEARNS and factor > 1.0):
            break
    return trials


def _at(
    subject: Subject,
    batches: Sequence[Read],
    num_steps: int,
    first: Sequence[float],
    peak: Sequence[float],
    factor: float,
) -> Trial:
    trainer = subject.trainer

    def set_lr(step: int) -> None:
        # A schedule with a warm-up is compressed into the first half of the trial.
        share = min(1.0, (step + 1) / max(num_steps / 2, 1))
        for group, low, high in zip(trainer.optimizer.param_groups, first, peak, strict=True):
            lr = factor * (low + (high - low) * share)
            if group["lr"] is None:  # the optimizer finds its own rate
                continue
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    limits = tightest(guard.limits() for guard in trainer.guards)
    with subject.clean(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimizer.step() without scheduler.step()
        return _train(subject, trainer.optimizer, batches, num_steps, set_lr, limits)


def _judge_range(subject: Subject, trials: dict[float, Trial], lr: float) -> Outcome:
    own = trials[1.0]
    most = max(trial.gain for trial in trials.values())
    # The fastest in a few steps may be too high for many steps: take the smallest that does nearly as well.
    best = min((f for f, trial in trials.items() if trial.gain >= 0.8 * most), default=1.0) if most > 0 else 1.0
    numbers = {
        "lr": lr,
        "num_steps": len(own.losses),
        "trials": {amount(lr * factor): trial.after for factor, trial in sorted(trials.items())},
        "before": own.before,
    }
    key = (
        "optimizer.lr"
        if "max_lr" not in (subject.trainer.config.scheduler or {})
        else "optimizer.lr (and scheduler.max_lr)"
    )
    course = (
        f"at {amount(lr)} the loss goes from {amount(own.before)} to {amount(own.after)} in {len(own.losses)} steps"
    )
    if own.diverged and best < 1.0 and trials[best].gain > 0:
        return failed(
            f"{course}: it diverges, at {amount(lr * best)} it goes to {amount(trials[best].after)}",
            f"lower the learning rate: {key}={amount(lr * best)}",
            **numbers,
        )
    if own.diverged:
        return failed(
            f"{course}: it diverges, and so do the {len(trials) - 1} smaller ones that were tried",
            "standardise inputs and targets, average the loss, then lower the learning rate until it goes down",
            **numbers,
        )
    if abs(own.gain) < STANDS_STILL and best > 1.0 and trials[best].gain > LEARNS / 2:
        return warned(
            f"{course}: hardly anything; at {amount(lr * best)} it goes to {amount(trials[best].after)}",
            f"raise the learning rate: {key}={amount(lr * best)}",
            **numbers,
        )
    return passed(course, **numbers)


def _schedule(subject: Subject) -> list[tuple[float, ...]] | Outcome:
    """The learning rates of the run, step by step; a failure if the schedule itself fails."""
    trainer, scheduler = subject.trainer, subject.trainer.scheduler
    num_steps, every = min(_run_length(subject) or 1000, 20_000), trainer.stepper.schedule.every
    if every == "epoch":
        num_steps = min(trainer.config.loop.max_epochs or 1, num_steps)
    rates = [trainer.stepper.schedule.lrs]
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return rates
    with subject.clean(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scheduler.step() without optimizer.step()
        begin = time.perf_counter()
        for step in range(1, num_steps):
            try:
                scheduler.step()
            except Exception as error:
                return failed(
                    f"the schedule {type(scheduler).__name__} fails after {step} of {num_steps} {every}s: {error}",
                    f"set it up for the {num_steps} {every}s of the run (loop.max_{every}s), or set scheduler.every",
                    step=step,
                )
            rates.append(trainer.stepper.schedule.lrs)
            if time.perf_counter() - begin > 0.1 * subject.budget.seconds:
                break
    return rates


def _run_length(subject: Subject) -> int | None:
    loop, num_batches = subject.trainer.config.loop, subject.sample.num_batches
    by_epochs = None
    if num_batches is not None and (loop.max_steps is None or loop.max_epochs is not None):
        by_epochs = -(-num_batches // loop.grad_accum) * (loop.max_epochs or 1)
    known = [count for count in (loop.max_steps, by_epochs) if count is not None]
    return min(known) if known else None
