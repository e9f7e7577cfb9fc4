"""Steps of several ranks: no rank decides anything before it knows what all ranks report.

    forward … ─ last forward ─ send numbers (without waiting) ─ backward ─ receive ─ judge the same numbers

Every rank takes part in every exchange of gradients. A rank whose forward raised contributes zero gradients, and all refuse the step;
one whose backward raised has already reported a finished forward, and stands in with NaN, which no guard lets pass.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..core.verdict import Action, Decision
from ..core.view import DeviceStep, StepView
from ..distributed.agreement import RankDecision, RankReports, RankState, merged
from ..distributed.comm import Failure, Link, is_communication_error, name_ranks
from ..distributed.machine import Machine
from ..errors import DataError, Interrupted, RankError, SafetrainError, TrainingStopped
from ..tensors.sharded import is_sharded
from .exchange import Exchange
from .measurement import Measurement
from .rank_numbers import RankNumbers

if TYPE_CHECKING:
    from .step import Step

T = TypeVar("T")


class NoWindow(list[Any]):
    """In place of a window: this rank's data raised, which all ranks must learn."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __bool__(self) -> bool:
        return True


class Abandoned(Exception):
    """The run is to end, and some rank has no window for this step any more: the step is dropped."""


class JointMeasurement(Measurement):
    """The numbers of a step over all ranks, on the host already."""

    def __init__(self, numbers: dict[str, Any], grad_norm: Tensor, window: Sequence[Any]) -> None:
        self._numbers, self.grad_norm, self.window = numbers, grad_norm, window
        self.num_losses = len(numbers["micro_losses"])
        self.vector = torch.empty(0)

    def read(self) -> dict[str, Any]:
        return {**self._numbers, "window": self._window_while_measured()}


class JointExchange(Exchange):
    def __init__(self, machine: Machine) -> None:
        assert machine.link is not None
        super().__init__(machine.link.watchdog)
        self._machine, self._replicas = machine, machine.replicas
        self.link: Link = machine.link
        self.rank, self.world_size = machine.rank, machine.world_size
        self._numbers = RankNumbers(self.link)
        self._late_error: Exception | None = None
        """What this rank's backward raised after it had reported a finished forward."""
        self.own_decision: Decision | None = None
        """This rank's own decision about the step that was refused last."""
        self._failure_is_explained = False
        self._needs_warm_up = False

    @property
    def reports(self) -> RankReports:
        """What the ranks reported in the last attempt."""
        return self._numbers.reports

    @contextmanager
    def reports_kept(self) -> Iterator[None]:
        """An attempt inside does not replace `reports`."""
        reports = self._numbers.reports
        try:
            yield
        finally:
            self._numbers.reports = reports

    # ---- what all ranks know -----------------------------------------------------------------------------------

    @property
    def signal(self) -> int | None:
        return self.reports.signal

    @property
    def out_of_time(self) -> bool:
        return self.reports.out_of_time

    @property
    def is_stopping(self) -> bool:
        return self.reports.is_stopping

    def gather(self, value: T) -> list[T]:
        return self._machine.gather(value)

    def any_rank(self, flag: bool) -> bool:
        return self._machine.any_rank(flag)

    def mean(self, numbers: Tensor) -> Tensor:
        return self._machine.share(numbers)

    # ---- one step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._replicas is not None:
            self._replicas.sync_buffers()

    def begin_attempt(self, step: Step, window: Sequence[Any]) -> None:
        self._numbers.begin_attempt()
        super().begin_attempt(step, window)
        pending, self._late_error = self._late_error, None
        self.failed_together = self._failure_is_explained = False
        if self._replicas is not None:
            self._replicas.begin()
        if pending is not None:  # of the attempt before, which the fp16 scaler took for an overflow
            raise pending
        if isinstance(window, NoWindow):
            raise window.error

    def gradient_sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        super().gradient_sync(model, is_last)
        return self._machine.gradient_sync(model, is_last)

    def before_backward(
        self,
        step: Step,
        losses: Sequence[Tensor],
        metrics: Sequence[Mapping[str, Any]],
        window: Sequence[Any],
        is_last: bool,
    ) -> None:
        if is_last:
            self._numbers.send(self.run, RankState.STEP, self._numbers.early_values(step, losses, metrics, window))
            if self._replicas is not None:
                self._replicas.begin_backward()
        super().before_backward(step, losses, metrics, window, is_last)

    def stand_in(self, step: Step, error: Exception, window: Sequence[Any]) -> None:
        if is_communication_error(error) or self._replicas is None:
            raise error
        if not self._numbers.are_sent:
            self._numbers.send(self.run, self._state_after(step, error, window))
            self._replicas.stand_in()
            self._numbers.receive(step)
            self._fail(step, error)
        if not self._replicas.stand_in(poison=True):
            raise error  # every gradient was exchanged: too late to refuse
        self._late_error = error
        for parameter in step.parameters:  # as the others have it
            parameter.grad = torch.full_like(parameter, math.nan) if parameter.requires_grad else None

    def measured(
        self, step: Step, on_device: DeviceStep, losses: Sequence[Tensor], metrics: Sequence[Mapping[str, Any]]
    ) -> Measurement:
        host_norm = self._numbers.receive(step, on_device.grad_norm)
        if self.reports.in_state(RankState.FAILED, RankState.FATAL):
            self._fail(step, None)
        if self.reports.in_state(RankState.END):
            self._raise_uneven_data(step)
        numbers = self._numbers.means(len(losses))
        late, error = self._numbers.late_signals(step, on_device)
        if self.reports.in_state(RankState.FATAL):
            self._fail(step, error)
        self._numbers.last_norm = host_norm
        numbers["signals"] |= late
        numbers |= {"grad_norm": host_norm, "loss_scale": step.precision.host_loss_scale()}
        return JointMeasurement(numbers, on_device.grad_norm, on_device.window)

    def agree(self, step: Step, decision: Decision, view: StepView) -> Decision:
        """Merges all ranks' decisions about a step that this rank refuses. Every rank refuses it: they judge the same numbers."""
        if decision.action is Action.COMMIT:
            return decision
        self.own_decision = decision
        late = self._late_error
        is_fatal = late is not None and not self._is_explained(step, late, view.window())
        text = None if late is None else f"backward raised {type(late).__name__}: {late}"
        own = RankDecision(_sendable(decision), isinstance(view.error, RankError), text)
        received = self.link.gather((own, Failure.of(self.rank, late) if late is not None and is_fatal else None))
        decisions = [decision for decision, _ in received]
        if any(decision.late_error is not None for decision in decisions):
            self._reset_replicas(step)
        if late is not None and is_fatal:
            raise late
        if fatal := [failure for _, failure in received if failure is not None]:
            raise fatal[0].as_error(f"in the backward pass of step {view.step}")
        self._late_error = None
        suspects = self.reports.suspects
        suspects.sort(key=lambda rank: decisions[rank].late_error is None)  # stable
        return merged(decisions, suspects)

    # ---- when a rank fails -------------------------------------------------------------------------------------

    def may_be_refused(self, error: Exception) -> bool:
        return self.failed_together

    def explains(self, step: Step, view: StepView) -> bool:
        return self._failure_is_explained

    def is_abandoned(self, error: Exception) -> bool:
        return isinstance(error, Abandoned)

    def _state_after(self, step: Step, error: Exception, window: Sequence[Any]) -> RankState:
        """Is what this rank's forward raised a refused step, or the end of the run?"""
        if isinstance(error, SafetrainError) or isinstance(window, NoWindow):
            return RankState.FATAL
        step.transaction.restore()
        return RankState.FAILED if self._is_explained(step, error, window) else RankState.FATAL

    def _is_explained(self, step: Step, error: Exception, window: Sequence[Any]) -> bool:
        try:
            return step.explains(step.view_of_error(error, window))
        except SafetrainError:  # a guard ends the run
            return False

    def _fail(self, step: Step, error: Exception | None) -> NoReturn:
        """Some rank has raised: raise on all."""
        failures = self.link.gather(None if error is None else Failure.of(self.rank, error))
        self.failed_together = True
        self._failure_is_explained = not self.reports.in_state(RankState.FATAL)
        self._reset_replicas(step)
        if error is not None:
            raise error
        first = next(failure for failure in failures if failure is not None)
        raise first.as_error(f"at step {step.index}")

    def _raise_uneven_data(self, step: Step) -> NoReturn:
        if self.reports.signal is not None:
            raise Abandoned
        ended, others = self.reports.in_state(RankState.END), self.reports.in_state(RankState.STEP)
        raise DataError(
            f"{name_ranks(ended)} had no more data at step {step.next_index}, in epoch {step.history.epoch}, while "
            f"{name_ranks(others)} had.\nTo fix: give every rank the same number of batches; a Dataset or a list of batches is "
            "split evenly automatically."
        )

    def _reset_replicas(self, step: Step) -> None:
        """A DDP reducer whose backward did not finish cannot be used again."""
        step.transaction.restore()
        step.clear_gradients()
        self.renew(step)

    def renew(self, step: Step) -> None:
        """Wrap the model in DDP again, on all ranks at once. Also after a replay: one that tries another precision makes torch
        forget the hooks by which DDP learns of a gradient."""
        if self._replicas is not None:
            step.called = step.model
            step.called = self._replicas.rewrap()
            step.transaction.expect_weights()  # DDP broadcasts the weights of rank 0, which are the same

    # ---- around the steps --------------------------------------------------------------------------------------

    def no_window(self, error: Exception) -> NoWindow:
        return NoWindow(error)

    def end_of_epoch(self, step: Step) -> None:
        step.index = step.next_index
        if self._replicas is not None:
            self._replicas.begin()
        self._numbers.send(self.run, RankState.END)
        self._numbers.receive(step)
        if len(self.reports.in_state(RankState.END)) == self.world_size:
            return
        if self._replicas is not None:
            self._replicas.stand_in()
        if self.reports.in_state(RankState.FAILED, RankState.FATAL):
            self._fail(step, None)
        if self.reports.signal is None:
            self._raise_uneven_data(step)

    @property
    def has_gradient_order(self) -> bool:
        """DDP has seen a backward, from which it takes the order in which it sums gradients."""
        return self._replicas is not None and self._replicas.has_order

    def resume_gradient_order(self, had_order: bool) -> None:
        # The sum of two numbers is the same in any order.
        self._needs_warm_up = had_order and self._replicas is not None and self.world_size > 2

    def warm_up(self, step: Step, window: Sequence[Any]) -> None:
        """One forward and backward that leaves no trace but the order in which DDP sums gradients.

        DDP finds that order in the first backward of a process and keeps it. Sums over three or more processes are rounded
        differently in another order, so a resumed run must not take a step before it has the order of the run it goes on with.
        """
        if not self._needs_warm_up:
            return
        self._needs_warm_up = False
        step.index = step.next_index
        step.transaction.begin(window)
        try:
            step.attempt(window)
        except Exception as error:
            if is_communication_error(error):
                raise
        step.transaction.rewind()
        step.undo(step.precision.host_loss_scale())
        self._numbers.last_norm, self._numbers.reports = 0.0, replace(self.reports, rows=())

    def replays_alone(self, model: nn.Module) -> bool:
        # Not if its forward pass itself communicates with the other ranks.
        return not (is_sharded(model) or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()))

    def may_replay_now(self, model: nn.Module) -> bool:
        # DDP that has run a forward pass takes the next backward for that of the step, and exchanges its gradients.
        return self.replays_alone(model) and not (self._replicas is not None and self._replicas.has_entered)

    def own_loss(self, view: StepView) -> float | None:
        row = self.reports.rows[self.rank] if self.reports.rows else {}
        found = [tally for name, tally in row.items() if name.startswith("loss/")]
        return found[0].total if len(found) == 1 else None

    def explained(self, error: BaseException) -> BaseException:
        return self.link.explained(error)

    @contextmanager
    def alone(self, step: Step) -> Iterator[None]:
        called = step.called
        if self._replicas is not None and self._replicas.model is not None:
            step.called = self._replicas.model.module
        step.exchange = Exchange(self.watchdog)
        try:
            yield
        finally:
            step.called, step.exchange = called, self

    @contextmanager
    def session(self, step: Step) -> Iterator[None]:
        """A launcher ends the others as soon as one rank has left with an error, so none leaves while another still writes."""
        self._numbers.begin_run(step.guards)
        try:
            try:
                yield
            except (TrainingStopped, Interrupted):
                self._leave_together()
                raise
            self._leave_together()
        except BaseException as error:
            explained = self.link.explained(error)
            if explained is not error:
                raise explained from error
            if self.failed_together:
                self._leave_together()
            self.watchdog.failed(f"{type(error).__name__}: {error}")
            raise
        finally:
            step.called = step.model  # destroying the process group can hang while a DDP model is alive
            self._machine.close()

    def _leave_together(self) -> None:
        with suppress(Exception):
            self.link.gather(None, "waiting for the other ranks to finish")


def _sendable(decision: Decision) -> Decision:
    """Without evidence that cannot be pickled: a guard may put anything there."""

    def is_sendable(value: Any) -> bool:
        try:
            pickle.dumps(value)
        except Exception:
            return False
        return True

    verdicts = {
        name: replace(
            verdict,
            evidence={key: value for key, value in verdict.evidence.items() if is_sendable(value)},
            recording=verdict.recording if is_sendable(verdict.recording) else None,
        )
        for name, verdict in decision.verdicts.items()
    }
    return replace(decision, verdicts=verdicts)
