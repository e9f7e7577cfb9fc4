"""One step of the user's own loop, from the first micro-batch to the decision.

with guard.step(batch):                    begin ─ the loop's forward and backward
    …  optimizer.step()                    judge ─┬─ commit   the loop's own optimizer.step() goes on
                                                  └─ undo ─ recover: repair and commit, skip, go back, or stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .._private import host
from ..core.verdict import Action, Decision
from ..core.view import StepView
from ..distributed.activity import LOOP, STEP
from ..errors import UsageError
from ..optim.schedule import scaled_lr
from ..step.step import Outcome
from ..tensors.nest import to_device
from ..trainer.session import Session
from .hosted_step import HostedPrecision, HostedStep
from .interception import OptimizerSteps, evaluated
from .settings import AutocastSeen, Kept, check_first_step, check_loss_fn, check_precision, confirmable
from .window import Window

if TYPE_CHECKING:
    from .guard import LoopGuard

COMMITTED, REFUSED, OVERFLOWED = "committed", "refused", "overflow"
MANY_BLOCKS = 512
MANY_LEFT_OUT = 3
"""Steps at the start that were never taken: then the loop has not left them out, but calls `optimizer.step()` in the wrong place."""


class Turn:
    """Context manager around the code of one micro-batch; the same object for all steps."""

    def __init__(self, guard: LoopGuard, step: HostedStep, precision: HostedPrecision, session: Session) -> None:
        self._guard, self._step, self._precision, self._session = guard, step, precision, session
        self._steps = OptimizerSteps(guard.optimizers, self._decide)
        self._stop_listening = host.listen(self)
        self._autocast = AutocastSeen(guard.given, step.device.type)
        self._activity = step.exchange.watchdog.activity
        self._activity.begin(LOOP)
        self._window: Window | None = None
        self._next: tuple[Any, ...] = ()
        self._inside = ExitStack()
        self._is_inside = self._is_busy = False
        self._scaled: dict[int, Tensor] = {}
        self._num_decided = self._num_left_out = 0
        self.was_committed = False

    def let_go(self) -> None:
        self._steps.remove()
        self._stop_listening()
        self._autocast.remove()
        self._window = None

    # ---- around the loop's code --------------------------------------------------------------------------------

    def on(self, batches: tuple[Any, ...]) -> Turn:
        self._next = batches
        return self

    def __enter__(self) -> Turn:
        self.enter(self._next)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.leave(error)

    def enter(self, batches: Sequence[Any]) -> None:
        """Begin a block: that of the first micro-batch of a step, or of a further one."""
        if self._is_inside:
            raise UsageError(
                "guard.step() was entered within another block of the same guard.\n"
                "To fix: close the block of one step before the next; give each of several models its own watch()."
            )
        if not batches and self._guard.recorder is None:
            raise UsageError(
                "guard.step() was given no batch, and watch() was given a loss_fn, which needs one.\n"
                "To fix: with guard.step(batch): …"
            )
        with self._ends_with_an_error():
            self._guard.prepare()
            self._begin_block(list(batches))
        self._is_inside = True
        self._inside.enter_context(self._step.patches.scope)

    def leave(self, error: BaseException | None = None) -> bool:
        """End a block. True: what its code raised is a refused step, which is dealt with."""
        was_inside, self._is_inside = self._is_inside, False
        self._inside.close()
        window = self._window
        if self._guard.closed or window is None or not was_inside:
            return False
        is_refused = error is not None and window.outcome is None and self.raised(error)
        with self._ends_with_an_error():
            if window.outcome is not None:
                self._finish(window)
            elif not window.losses:  # the loop has left the step out by itself, or only looked at something
                self._window = None
        if self._window is None:
            self._activity.begin(LOOP)
        if error is not None and not is_refused:
            self._guard.ended_by(error)
        return is_refused

    @contextmanager
    def _ends_with_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._guard.ended_by(error)
            raise

    def _begin_block(self, batches: list[Any]) -> None:
        step, window = self._step, self._window
        if window is not None and window.losses and self._are_cleared():  # the loop has left that step out by itself
            window = None
            self._num_left_out += 1
            if self._num_decided == 0 and self._num_left_out >= MANY_LEFT_OUT:
                raise UsageError(
                    "the gradients of the last block were cleared, and optimizer.step() was not called in it.\n"
                    "To fix: put optimizer.step() into the block, before zero_grad(): with guard.step(batch): …; loss.backward(); "
                    "optimizer.step(); optimizer.zero_grad()"
                )
        recorder = self._guard.recorder
        if window is None:
            window = self._window = Window()
            self._activity.begin(STEP)
            self._scaled.clear()
            step.begin(batches or [()])
            if recorder is not None:
                recorder.begin()
        else:
            step.transaction.extend(batches)
            window.before = len(window.batches), len(window.losses), 0 if recorder is None else len(recorder.calls)
        window.batches += batches
        window.num_blocks += 1
        if window.num_blocks == MANY_BLOCKS:
            self._session.run.warn(
                f"{MANY_BLOCKS} blocks of guard.step() in a row had no optimizer.step(): nothing was judged or applied yet"
            )

    def _finish(self, window: Window) -> None:
        """Between two steps: what the loop moved after a refusal goes back, and snapshots are taken when due."""
        self._window = None
        self._activity.begin(LOOP)
        self._step.learn_at_the_end()
        if window.kept is not None:
            window.kept.restore()
        if window.scaler is not None:  # the loop did not call update()
            window.scaler.update(window.scaler.get_scale())
        if self._guard.recorder is not None:
            self._guard.recorder.end()
        if (problem := self._session.checkpoints.after_step(lambda: None)) is not None:
            with self.ours():
                self._session.bad_state(problem)

    def raised(self, error: BaseException) -> bool:
        """The loop's code raised before the step. If a guard knows why, that is a refused step; else it is the loop's error."""
        step, window = self._step, self._window
        if window is None or window.outcome is not None:
            return False
        self._window = None
        batches = self._replayable(window)
        random_state = step.transaction.random_state
        step.transaction.restore()
        step.clear_gradients()
        if not isinstance(error, Exception) or not step.exchange.may_be_refused(error):
            return False
        view = step.view_of_error(error, window.batches or batches)
        if not step.exchange.explains(step, view):
            return False
        self._guard.choose_rungs()
        with self._ends_with_an_error(), self.ours():
            action = self._session.refused_by_error(view, batches, random_state)
        self._window = window
        self._decided(window, action)
        return True

    def _decided(self, window: Window, action: Action) -> None:
        """After recovery: what the loop does until the end of its step is of no effect."""
        window.is_done, self.was_committed = True, action is Action.COMMIT
        window.outcome = COMMITTED if self.was_committed else REFUSED
        if not self.was_committed:
            window.kept = Kept(self._step)

    # ---- what the loop does ------------------------------------------------------------------------------------

    def on_backward(self, losses: Any) -> None:
        if self._window is None or self._is_busy or not torch.is_grad_enabled():
            return
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            loss = self._scaled.get(id(loss), loss)
            self._step.see_first_loss(loss, self._seen(self._window))
            self.note_loss(loss)

    def note_loss(self, loss: Tensor) -> None:
        window = self._window
        if window is None:
            raise UsageError("there is no step to note a loss for.\nTo fix: call it inside: with guard.step(batch): …")
        if window.outcome is not None:
            return  # of another step in the same block; its optimizer.step() will say so
        if loss.numel() != 1:
            raise UsageError(
                f"backward was called on a tensor of shape {tuple(loss.shape)}, so this step has no loss to judge.\n"
                "To fix: call backward on a scalar loss, loss.mean().backward()."
            )
        if window.before[1] == len(window.losses) > 0 and self._are_cleared():
            self._forget_earlier(window)  # the loop has left that step out by itself
        factor, node = host.scalar_factor(loss)
        if self._guard.recorder is not None:
            self._guard.recorder.note_loss(loss, factor, node)
        window.factors.append(factor)
        window.losses.append(loss.detach().reshape(()))

    def _are_cleared(self) -> bool:
        return all(parameter.grad is None for parameter in self._step.parameters)

    def _forget_earlier(self, window: Window) -> None:
        """What came before the present block is not in the gradients."""
        num_batches, num_losses, num_calls = window.before
        del window.batches[:num_batches], window.losses[:num_losses], window.factors[:num_losses]
        window.before, window.num_blocks = (0, 0, 0), 1
        if self._guard.recorder is not None:
            self._guard.recorder.forget(num_calls)

    def on_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None:
        if self._window is not None and not self._is_busy and loss.requires_grad:
            self._scaled = {id(scaled): loss}
            self._precision.host_scaler = scaler

    def owns(self, optimizer: Any) -> bool:
        return not self._is_busy and any(optimizer is each for each in self._guard.optimizers)

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, proceed: Callable[[], Any]) -> Any:
        self._precision.host_scaler = scaler

        def passed(*args: Any, **kwargs: Any) -> Any:
            with self._steps.passing():
                return proceed()

        return self._decide(optimizer, passed, (), {})

    def keeps_scale(self, scaler: GradScaler) -> bool:
        window = self._window
        if window is None or window.scaler is not scaler:
            return False
        window.scaler = None
        return True

    def _decide(
        self, optimizer: Optimizer, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In place of `optimizer.step(…)`."""
        window = self._window
        if window is None:
            raise UsageError(
                "optimizer.step() was called outside of guard.step(), so this update could not be judged.\n"
                "To fix: put forward, backward and optimizer.step() into the block: with guard.step(batch): …; or call guard.close() "
                "to train on unwatched."
            )
        if window.outcome is not None:
            return self._decided_before(window, optimizer, proceed, args, kwargs)
        value, (args, kwargs) = evaluated(optimizer, args, kwargs)
        window.stepped.append(optimizer)
        with self._ends_with_an_error():
            answer = self._judge(window, optimizer, lambda: proceed(*args, **kwargs))
        if not self._is_inside:
            self._finish(window)
        return answer if value is None else value

    def _decided_before(
        self, window: Window, optimizer: Optimizer, proceed: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if any(optimizer is each for each in window.stepped):
            raise UsageError(
                "optimizer.step() was called twice in one block of guard.step(), and one block is one step.\n"
                "To fix: give the second step its own block, or the second model its own watch()."
            )
        window.stepped.append(optimizer)
        if window.is_done:
            return None
        with scaled_lr(optimizer, window.lr_scale):
            return proceed(*args, **kwargs)

    # ---- judge -------------------------------------------------------------------------------------------------

    def _judge(self, window: Window, optimizer: Optimizer, proceed: Callable[[], Any]) -> Any:
        step = self._step
        if self._guard.recorder is not None:
            self._guard.recorder.pause()
        if self._num_decided == 0:
            check_first_step(step, window.losses)
            self._autocast.remove()
            check_precision(self._precision.name, self._autocast.name, self._precision.host_scaler is not None)
        elif not window.losses:
            check_first_step(step, window.losses)
        losses = self._true_losses(window)
        if self._guard.checks_loss:
            self._guard.checks_loss = False
            if len(losses) == len(window.batches) and (odd := check_loss_fn(step, window.batches[0], float(losses[0]))):
                self._session.run.say_once(odd, is_warning=True)
        step.transaction.notice_writes()
        measurement = step.measure(self._seen(window), losses, [])
        view = step.view(measurement)
        decision = confirmable(step, step.judge(view), self._session.run.say_once)
        self._num_decided += 1
        answer: list[Any] = []
        if decision.action is Action.COMMIT:
            step.moving = lambda: answer.append(self._proceed(proceed))
            window.lr_scale = decision.lr_scale
            if view.scaler_overflow:  # the loop's scaler leaves the update out, and lowers its scale
                step.move()
                window.outcome, self.was_committed = OVERFLOWED, False
                self._session.committed(view, decision, ())
                return None
            outcome = step.commit(measurement, view, decision)
            step.moving = None
            if outcome is not Outcome.RUINED:
                window.outcome, self.was_committed = COMMITTED, True
                self._session.committed(view, decision, self._good_window(window))
                return answer[0]
            decision = step.refusal_of_ruined(view)
        self._refuse(window, optimizer, view, decision)
        return None

    def _refuse(self, window: Window, optimizer: Optimizer, view: StepView, decision: Decision) -> None:
        step = self._step
        batches = self._replayable(window, view.loss_scale)
        step.undo(view.loss_scale)
        window.scaler = self._precision.host_scaler
        step.moving = None
        self._guard.choose_rungs()
        with self.ours(), self._steps.passing():
            action = self._session.refused(view, decision, batches)
        self._decided(window, action)

    def _proceed(self, proceed: Callable[[], Any]) -> Any:
        with self._steps.passing():
            return proceed()

    def _true_losses(self, window: Window) -> list[Tensor]:
        """One for each micro-batch, before the loop divided it by their number."""
        losses, count = window.losses, len(window.losses)
        self._step.sums_losses = not window.is_divided
        if window.is_divided:
            return [loss * count for loss in losses]
        if count == 1:
            return list(losses)
        if len(window.batches) == count or self._guard.recorder is not None:
            return list(losses)
        return [torch.stack([loss.float() for loss in losses]).sum()]  # several terms of one loss

    def _replayable(self, window: Window, loss_scale: float = 1.0) -> Sequence[Any]:
        """What a replay calls the loss function with."""
        if (recorder := self._guard.recorder) is not None:
            losses, factors = window.losses or [torch.full((), torch.nan)], window.factors or [1.0]
            return recorder.window(losses, factors, loss_scale, window.is_divided) or window.batches or [()]
        return [to_device(batch, self._step.device) for batch in window.batches]

    def _seen(self, window: Window) -> Sequence[Any]:
        """What guards see of the data: the batches, or what the model was called with."""
        recorder = self._guard.recorder
        seen: list[Any] = window.batches or ([] if recorder is None else list(recorder.calls))
        return seen or [()]

    def _good_window(self, window: Window) -> Sequence[Any]:
        recorder = self._guard.recorder
        if recorder is not None and not recorder.is_whole:
            return ()  # a replay would give the recorded loss again, whatever the weights are
        return self._replayable(window)

    def ours(self) -> ExitStack:
        """Inside, forward, backward and steps are made by us."""
        stack = ExitStack()
        before, self._is_busy = self._is_busy, True
        stack.callback(setattr, self, "_is_busy", before)
        stack.enter_context(self._precision.ours())
        stack.enter_context(self._steps.passing())
        return stack

    def check_between_steps(self, doing: str) -> None:
        if self._window is not None or self._is_inside:
            raise UsageError(
                f"{doing} was called in the middle of a step.\nTo fix: call it between two blocks of guard.step()."
            )
