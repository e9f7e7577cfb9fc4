"""`guard.run`: a whole step in the user's own loop, run in the same way as by SafeTrainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.verdict import Action
from ..distributed.activity import LOOP, STEP
from ..errors import UsageError
from ..step.step import Outcome
from ..tensors.nest import to_device
from ..trainer.session import Session
from .hosted_step import HostedStep

if TYPE_CHECKING:
    from .guard import LoopGuard
    from .turn import Turn


def whole_step(guard: LoopGuard, turn: Turn, step: HostedStep, session: Session, batch: Any) -> float:
    """Forward, backward, judge, commit; returns the loss."""
    turn.check_between_steps("guard.run()")
    if step.exchange.world_size > 1:
        raise UsageError(
            "guard.run() works in a single process.\n"
            "To fix: let the loop run its own forward and backward: with guard.step(batch): …"
        )
    try:
        guard.prepare()
        with turn.ours():
            step.drives = True
            step.exchange.watchdog.activity.begin(STEP)
            try:
                return _attempt(turn, step, session, [to_device(batch, step.device)])
            finally:
                step.drives = False
                step.exchange.watchdog.activity.begin(LOOP)
    except BaseException as error:
        guard.ended_by(error)
        raise


def _attempt(turn: Turn, step: HostedStep, session: Session, window: list[Any]) -> float:
    step.clear_gradients()
    step.begin(window)
    random_state = step.transaction.random_state
    try:
        measurement = step.attempt(window)
    except Exception as error:
        step.transaction.restore()
        step.clear_gradients()
        view = step.view_of_error(error, window)
        if not step.exchange.may_be_refused(error) or not step.exchange.explains(step, view):
            raise
        turn.was_committed = session.refused_by_error(view, window, random_state) is Action.COMMIT
    else:
        view = step.view(measurement)
        decision = step.judge(view)
        outcome = step.commit(measurement, view, decision) if decision.action is Action.COMMIT else Outcome.RUINED
        turn.was_committed = outcome is Outcome.COMMITTED
        if outcome is not Outcome.RUINED:
            session.committed(view, decision, window)
        else:
            if decision.action is Action.COMMIT:
                decision = step.refusal_of_ruined(view)
            step.undo(view.loss_scale)
            turn.was_committed = session.refused(view, decision, window) is Action.COMMIT
    if (problem := step.schedule.error) is not None:
        raise UsageError(step.schedule.failed_after(view.step)) from problem
    if (verdict := session.checkpoints.after_step(lambda: None)) is not None:
        session.bad_state(verdict)
    return view.loss
