"""Check of the learning-rate schedule over the whole run, before its first step."""

from __future__ import annotations

from ...core.numbers import amount
from ...optim.forecast import doubt, forecast
from ...trainer.session import total_epochs, total_steps
from ..outcome import Outcome, graded, passed, skipped
from ..registry import preflight_check
from ..subject import Subject


@preflight_check(
    looks_at="whether the schedule counts what it is stepped by: steps, or epochs",
    fails="the rate falls to a thousandth before half of the run is over, or the schedule ends before the run",
    warns="it changes in the first steps only, as if they were epochs",
    fix="`scheduler.every: epoch`, or a schedule made for the number of steps",
)
def schedule(subject: Subject) -> Outcome:
    trainer = subject.trainer
    schedule = trainer.stepper.schedule
    if schedule.scheduler is None:
        return passed("none: the learning rate stays as it is")
    num_steps, num_epochs = total_steps(trainer.config, trainer.stream), total_epochs(trainer.config, trainer.stream)
    with subject.clean():
        found = doubt(schedule, num_steps, num_epochs)
        seen = forecast(schedule, (num_epochs if schedule.every == "epoch" else num_steps) or 1000)
    if found is not None:
        return graded(found.is_fatal, found.reason, found.fix)
    if seen is None:
        return skipped(f"{type(schedule.scheduler).__name__} cannot be tried on a copy")
    return passed(f"from {amount(seen.rates[0])} to {amount(seen.rates[-1])} in {len(seen.rates)} {schedule.every}s")
