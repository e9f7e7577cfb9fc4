"""Steps that several ranks make together: no rank decides anything before it knows what all ranks know.

    forward … ─ last forward ─ tell the others (nobody waits) ─ backward ─ hear the others ─ judge the same numbers

Every rank takes part in every exchange of gradients. One whose forward raised stands in with zeros, and all refuse the step;
one whose backward raised has told the others already that its step is fine, and stands in with NaN, which no guard lets pass.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..core.verdict import Decision
from ..core.view import DeviceStep, Limits, StepView
from ..distributed.agreement import (
    Layout,
    Opinion,
    Row,
    Status,
    Told,
    Values,
    Word,
    largest_over,
    mean_over,
    merged,
    tallied,
)
from ..distributed.link import Failure, Sending, in_words, is_communication_error
from ..errors import DataError, RankError, SafetrainError
from ..guards import Guard
from ..tensors import gradients
from ..trainer import build as assembly
from .measurement import Measurement

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer


class NoWindow(list[Any]):
    """In place of a window: this rank's data raised, which all ranks must hear of."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __bool__(self) -> bool:
        return True


class Abandoned(Exception):
    """The run is to end, and some rank has no window for this step any more: it never happened."""


class JointMeasurement(Measurement):
    """The numbers of a step over all ranks, on the host already."""

    def __init__(self, numbers: dict[str, Any], grad_norm: Tensor, window: Sequence[Any]) -> None:
        self._numbers, self.grad_norm, self.window = numbers, grad_norm, window
        self.num_losses = len(numbers["micro_losses"])
        self.vector = torch.empty(0)

    def unpack(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {**self._numbers, "window": self._window_while_measured()}


class JointSteps:
    def __init__(self, trainer: SafeTrainer) -> None:
        assert trainer.engine.link is not None
        self._trainer, self.link, self._replicas = trainer, trainer.engine.link, trainer.engine.replicas
        self._layout, self._late_layout = Layout(), Layout()
        self.told = Told([Word(Status.STEP)] * self.link.world_size)
        self._last_norm = 0.0
        self._late_error: Exception | None = None
        self.own_decision: Decision | None = None
        """What this rank alone said of the step that was refused last."""
        self.failed_together = self.failure_is_explained = False
        """Some rank raised in the last attempt, and all know it; every one that did so because of its numbers."""
        measuring = [guard for guard in trainer.guards if type(guard).measure is not Guard.measure]
        self._early_guards = [guard for guard in measuring if _is_early(guard)]
        self._late_guards = [guard for guard in measuring if not _is_early(guard)]

    @property
    def signal(self) -> int | None:
        """The signal that asked any rank to end, as all ranks know it."""
        return self.told.signal

    @property
    def out_of_time(self) -> bool:
        return self.told.out_of_time

    @property
    def own_loss(self) -> float | None:
        """Of this rank's window in the last step, if that was a single micro-batch: bit for bit what it computed."""
        row = self.told.rows[self.link.rank] if self.told.rows else {}
        found = [tally for name, tally in row.items() if name.startswith("loss/")]
        return found[0].total if len(found) == 1 else None

    # ---- one step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a step: the buffers of rank 0 on every rank."""
        if self._replicas is not None:
            self._replicas.sync_buffers()

    def attempt(self, window: Sequence[Any]) -> tuple[Measurement, Limits]:
        """As the trainer's `_attempt`, on all ranks; raises on all of them if it does on one."""
        trainer, engine, watchdog = self._trainer, self._trainer.engine, self.link.watchdog
        losses: list[Tensor] = []
        metrics: list[Mapping[str, Any]] = []
        values: Values = {}
        sending: Sending | None = None
        error: Exception | None = None
        pending, self._late_error = self._late_error, None
        self.failed_together = self.failure_is_explained = False
        if self._replicas is not None:
            self._replicas.begin()
        try:
            if pending is not None:  # of the step before, which the fp16 scaler took for an overflow
                raise pending
            if isinstance(window, NoWindow):
                raise window.error
            for index, batch in enumerate(window):
                is_last = index == len(window) - 1
                with engine.gradient_sync(trainer._called_model, sync=is_last), trainer.patches:
                    watchdog.at("forward pass", trainer.step)
                    loss, beside = trainer._forward(batch)
                    if not trainer._checked_backward and index == 0:
                        assembly.check_no_backward(trainer._parameters)
                    losses.append(loss.detach())
                    metrics.append(beside)
                    if is_last:
                        values = self._values(losses, metrics, window)
                        sending = self._send(Status.STEP, values)
                        if self._replicas is not None:
                            self._replicas.begin_backward()
                    watchdog.at("backward pass")
                    engine.backward(loss if len(window) == 1 else loss / len(window))
            trainer.transaction.notice_writes()
            if not trainer._checked_backward:
                assembly.check_reached(trainer.optimizer)
                trainer._checked_backward = True
        except Exception as raised:
            if is_communication_error(raised) or self._replicas is None:
                raise
            error = raised
        if error is not None and self._replicas is not None:
            if sending is None:
                status = self._kind(error, window)
                values = {}
                sending = self._send(status, values)
                self._replicas.stand_in()
            elif self._replicas.stand_in(poison=True):
                self._late_error, error = error, None
                for parameter in trainer._parameters:  # as the others have it
                    parameter.grad = torch.full_like(parameter, math.nan) if parameter.requires_grad else None
            else:  # every gradient was exchanged: too late to refuse
                raise error
        assert sending is not None
        return self._heard(sending, values, error, window, losses)

    def _heard(
        self,
        sending: Sending,
        values: Values,
        error: Exception | None,
        window: Sequence[Any],
        losses: Sequence[Tensor],
    ) -> tuple[Measurement, Limits]:
        trainer, engine = self._trainer, self._trainer.engine
        norm = torch.full((), math.nan, device=engine.device)
        grads: list[Tensor] = []
        if error is None:
            engine.unscale(trainer.optimizer, trainer._parameters)
            grads = gradients.collect(trainer._parameters)
            norm = gradients.global_norm(grads, trainer._is_uniform).to(engine.device)
        host_norm = self._receive(sending, values, self._layout, norm)
        told = self.told
        if told.with_status(Status.FAILED, Status.FATAL):
            self._fail(error)
        if told.with_status(Status.END):
            self._uneven()
        signals = self._signals(told.rows)
        if any(word.is_measured_later for word in told.words):
            signals |= self._measured_later(losses, norm, grads, window)
        self._last_norm = host_norm
        numbers: dict[str, Any] = {
            "micro_losses": tuple(mean_over(told.rows, f"loss/{index}") for index in range(len(window))),
            "grad_norm": host_norm,
            "loss_scale": self._scale(),
            "signals": signals,
            "metrics": self._named(told.rows, "metric/", lambda name: mean_over(told.rows, name)),
        }
        numbers["loss"] = sum(numbers["micro_losses"]) / len(window)
        return JointMeasurement(numbers, norm, window), trainer.panel.limits()

    def warm_up(self, window: Sequence[Any]) -> None:
        """One forward and backward that leaves no trace but the order in which DDP sums gradients.

        DDP finds that order in the first backward of a process and keeps it. Sums over three or more processes are rounded
        differently in another order, so a resumed run must not take a step before it has the order of the run it goes on with.
        """
        trainer = self._trainer
        trainer.transaction.begin(window)
        try:
            self.attempt(window)
        except Exception as error:
            if is_communication_error(error):
                raise
        trainer.transaction.rewind()
        trainer.engine.keep_scale(self._scale())
        trainer._clear_gradients()
        self._last_norm, self.told = 0.0, replace(self.told, rows=())

    def end_of_epoch(self) -> None:
        """This rank has no more data. Raises, on all ranks, if others have."""
        if self._replicas is not None:
            self._replicas.begin()
        self._receive(self._send(Status.END, {}), {}, self._layout)
        if len(self.told.with_status(Status.END)) == self.link.world_size:
            return
        if self._replicas is not None:
            self._replicas.stand_in()
        if self.told.with_status(Status.FAILED, Status.FATAL):
            self._fail(None)
        if self.told.signal is None:
            self._uneven()

    def _scale(self) -> float:
        scale = self._trainer.engine.loss_scale()
        return 1.0 if scale is None else float(scale)

    # ---- telling and hearing -----------------------------------------------------------------------------------

    def _values(
        self, losses: Sequence[Tensor], metrics: Sequence[Mapping[str, Any]], window: Sequence[Any]
    ) -> dict[str, list[Tensor | float]]:
        trainer = self._trainer
        loss = losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
        unknown = torch.full((), math.nan, device=loss.device)
        transaction, audit = trainer.transaction, trainer.audit
        step = DeviceStep(trainer.step, loss, unknown, (), transaction.buffer_peak, audit.state_peak, window)
        values: dict[str, list[Tensor | float]] = {f"loss/{index}": [each] for index, each in enumerate(losses)}
        for guard in self._early_guards:
            values |= {f"signal/{guard.name}.{name}": [value] for name, value in guard.measure(step).items()}
        for each in metrics:
            for name, value in each.items():
                values.setdefault(f"metric/{name}", []).append(value)
        return values

    def _send(self, status: Status, values: Values) -> Sending:
        run = self._trainer.run
        word = Word(
            status,
            run.signal or 0,
            run.out_of_time,
            self._trail(),
            self._last_norm,
            bool(self._late_guards),
            self._layout.num_unknown(values),
        )
        return self.link.send(self._layout.pack(word, values, self.link.device))

    def _trail(self) -> int:
        run, result = self._trainer.run, self._trainer.run.result
        record = (run.step, run.num_refusals, result.steps, result.skipped, result.rollbacks, result.final_loss)
        return zlib.crc32(repr(record).encode())

    def _receive(self, sending: Sending, values: Values, layout: Layout, norm: Tensor | None = None) -> float:
        """Wait for the others' numbers and note them as `told`; returns `norm` on the host. One read for all of it."""
        self.link.watchdog.at("wait for the numbers of the other ranks", waiting=True)
        matrix = sending.wait()
        self.link.watchdog.at("decision")
        flat = matrix.flatten()
        numbers = (flat if norm is None else torch.cat([flat, norm.to(flat.dtype).reshape(1)])).tolist()
        width = matrix.shape[1]
        pairs = [layout.unpack(numbers[rank * width : (rank + 1) * width]) for rank in range(self.link.world_size)]
        words, rows = [word for word, _ in pairs], [row for _, row in pairs]
        if any(word.num_unknown for word in words):
            rows = self.link.gather(tallied(values))
            layout.extend(name for row in rows for name in row)
        self.told = Told(words, rows)
        if apart := self.told.come_apart:
            raise RankError(
                f"the ranks have come apart before step {self._trainer.step}: {in_words(apart)} went through other decisions or "
                "other gradients than rank 0.\nTo fix: look for what differs between ranks (a guard, a hook or a model that "
                "depends on the rank or on the local batch), then resume."
            )
        return numbers[-1] if norm is not None else 0.0

    def _signals(self, rows: Sequence[Row]) -> dict[str, float]:
        highest = {f"signal/{guard.name}." for guard in self._trainer.guards if guard.over_ranks == "max"}

        def value(name: str) -> float:
            is_peak = any(name.startswith(prefix) for prefix in highest)
            return largest_over(rows, name) if is_peak else mean_over(rows, name)

        return self._named(rows, "signal/", value)

    @staticmethod
    def _named(rows: Sequence[Row], prefix: str, value: Callable[[str], float]) -> dict[str, float]:
        names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
        return {name.removeprefix(prefix): value(name) for name in names}

    def _measured_later(
        self, losses: Sequence[Tensor], norm: Tensor, grads: Sequence[Tensor], window: Sequence[Any]
    ) -> dict[str, float]:
        """What guards measure after backward, in an exchange of its own."""
        trainer, told = self._trainer, self.told
        values: dict[str, list[Tensor | float]] = {}
        error: Exception | None = None
        try:
            loss = torch.stack(list(losses)).mean()
            transaction, audit = trainer.transaction, trainer.audit
            step = DeviceStep(trainer.step, loss, norm, grads, transaction.buffer_peak, audit.state_peak, window)
            for guard in self._late_guards:
                values |= {f"signal/{guard.name}.{name}": [value] for name, value in guard.measure(step).items()}
        except Exception as raised:
            error, values = raised, {}
        word = replace(told.words[self.link.rank], num_unknown=self._late_layout.num_unknown(values))
        if error is not None:
            word = replace(word, status=Status.FATAL)
        sending = self.link.send(self._late_layout.pack(word, values, self.link.device))
        self._receive(sending, values, self._late_layout)
        later, self.told = self.told, told
        if later.with_status(Status.FATAL):
            self.told = replace(told, words=later.words)
            self._fail(error)
        return self._signals(later.rows)

    # ---- when a rank fails -------------------------------------------------------------------------------------

    def _kind(self, error: Exception, window: Sequence[Any]) -> Status:
        """Is what this rank's forward raised a refused step, or the end of the run?"""
        if isinstance(error, SafetrainError) or isinstance(window, NoWindow):
            return Status.FATAL
        self._trainer.transaction.restore()
        return Status.FAILED if self._is_explained(error, window) else Status.FATAL

    def _is_explained(self, error: Exception, window: Sequence[Any]) -> bool:
        try:
            return self._trainer._explains(self._trainer._view_of_error(error, window))
        except SafetrainError:  # a guard knows that there is no going on
            return False

    def _fail(self, error: Exception | None) -> NoReturn:
        """Some rank has raised: raise on all."""
        failures = self.link.gather(None if error is None else Failure.of(self.link.rank, error))
        self.failed_together, self.failure_is_explained = True, not self.told.with_status(Status.FATAL)
        self._mend()
        if error is not None:
            raise error
        first = next(failure for failure in failures if failure is not None)
        raise first.as_error(f"at step {self._trainer.step}")

    def _uneven(self) -> NoReturn:
        if self.told.signal is not None:
            raise Abandoned
        ended, others = self.told.with_status(Status.END), self.told.with_status(Status.STEP)
        raise DataError(
            f"{in_words(ended)} had no more data at step {self._trainer.step}, in epoch {self._trainer.stream.epoch}, while "
            f"{in_words(others)} had.\nTo fix: give every rank the same number of batches; a Dataset or a list of batches is "
            "shared out evenly by itself."
        )

    def undo_abandoned(self, error: Exception, window: Sequence[Any]) -> bool:
        """The step never happened, and its window comes again after a resume. False for any other error."""
        if not isinstance(error, Abandoned):
            return False
        self._trainer.transaction.restore()
        self._trainer._clear_gradients()
        self._trainer.stream.num_consumed -= len(window)
        return True

    def _mend(self) -> None:
        """A reducer that did not come to the end of its step cannot be used again."""
        self._trainer.transaction.restore()
        self._trainer._clear_gradients()
        self.renew()

    def renew(self) -> None:
        """Tie the replicas together anew, on all ranks at once. Also after a replay: one that tries another precision makes
        torch forget the hooks by which DDP learns of a gradient."""
        trainer = self._trainer
        if self._replicas is not None:
            trainer._called_model = trainer.model
            trainer._called_model = self._replicas.rewrap()
            trainer.transaction.expect_weights()  # making the replicas sends the weights of rank 0 around, which are the same

    # ---- one decision for all ----------------------------------------------------------------------------------

    def agree(self, decision: Decision, view: StepView) -> Decision:
        """What all ranks' guards say of a step that this rank's refuse. Every rank refuses it: they judge the same numbers."""
        self.own_decision = decision
        late = self._late_error
        is_fatal = late is not None and not self._is_explained(late, view.window())
        text = None if late is None else f"backward raised {type(late).__name__}: {late}"
        opinion = Opinion(_sendable(decision), isinstance(view.error, RankError), text)
        heard = self.link.gather((opinion, Failure.of(self.link.rank, late) if late is not None and is_fatal else None))
        opinions = [opinion for opinion, _ in heard]
        if any(opinion.late_error is not None for opinion in opinions):
            self._mend()
        if late is not None and is_fatal:
            raise late
        if fatal := [failure for _, failure in heard if failure is not None]:
            raise fatal[0].as_error(f"in the backward pass of step {view.step}")
        self._late_error = None
        suspects = self.told.suspects
        suspects.sort(key=lambda rank: opinions[rank].late_error is None)  # stable
        return merged(opinions, suspects)

    def leave_together(self) -> None:
        """A launcher ends the others as soon as one rank has left with an error, so none leaves while another still writes."""
        with suppress(Exception):
            self.link.gather(None, "waiting for the other ranks to come to their end")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the model is called without its wrapper: nothing that it does concerns another rank."""
        trainer = self._trainer
        wrapped = trainer._called_model
        if self._replicas is not None and self._replicas.model is not None:
            trainer._called_model = self._replicas.model.module
        try:
            yield
        finally:
            trainer._called_model = wrapped


def _is_early(guard: Guard) -> bool:
    """Its numbers are known before backward. What a class says of its `measure` does not hold for one that overrides it."""
    measuring = next(cls for cls in type(guard).__mro__ if "measure" in vars(cls))
    return not vars(measuring).get("measures_backward", True)


def _sendable(decision: Decision) -> Decision:
    """Without evidence that cannot be pickled: a guard may put anything there."""

    def is_sendable(value: Any) -> bool:
        try:
            pickle.dumps(value)
        except Exception:
            return False
        return True

    verdicts = {
        name: replace(verdict, evidence={key: value for key, value in verdict.evidence.items() if is_sendable(value)})
        for name, verdict in decision.verdicts.items()
    }
    return replace(decision, verdicts=verdicts)
