"""One optimizer step as a transaction, for one process and many, without a run, files or a trainer.

begin ─ attempt: forward/backward ─ measure ─ view ─ judge ─┬─ commit   weights, moments, schedule, buffers move
                                                            └─ undo     as if the step had never been
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.copies import Copy
from ..checkpoint.state import Stateful, TrainState
from ..core.loss import no_graph, split_loss, unlogged_values
from ..core.verdict import Action, Decision, Verdict, merge
from ..core.view import DeviceStep, StepView
from ..forensics.patches import Patches
from ..forensics.raised import is_numeric
from ..guards.guard_set import GuardSet
from ..optim.ema import Ema
from ..optim.parameters import all_parameters, members_of
from ..optim.schedule import Schedule, scaled_lr
from ..precision.compiled import kept, replays_graphs
from ..precision.mixed import Precision
from ..tensors import gradients
from ..tensors.bounds import Bounds
from ..tensors.devices import place
from ..tensors.nest import same_nest
from . import views
from .audit import Audit
from .exchange import AttemptWatch, Exchange
from .first import FirstStep
from .held import Held
from .history import History
from .measurement import Measurement
from .transaction import Transaction

MAX_OVERFLOWS = 40
"""Attempts at one step while the fp16 loss scaler looks for its scale; it halves it each time."""


class Outcome(enum.Enum):
    COMMITTED = "commit"
    OVERFLOWED = "overflow"
    """fp16: the scaler's own way of skipping a step. Its scale is lower now, and nothing else has moved."""
    RUINED = "ruined"
    """The update made the state non-finite, and was taken back."""


class Stage(enum.Enum):
    """What an exception at this moment leaves behind."""

    BETWEEN = "between steps"
    """A whole state."""
    ATTEMPT = "attempt"
    """A whole state once the step is undone."""
    MOVING = "moving"
    """Neither the state before the step nor the one after it."""


class Step:
    def __init__(
        self,
        model: nn.Module,
        training_step: Callable[[nn.Module, Any], Any],
        optimizer: Optimizer,
        *,
        guards: GuardSet,
        precision: Precision,
        schedule: Schedule | None = None,
        ema: Ema | None = None,
        exchange: Exchange | None = None,
        called: nn.Module | None = None,
    ) -> None:
        """`called`: what is called instead of the model itself, compiled or distributed."""
        self.model, self.called = model, model if called is None else called
        self.training_step, self.optimizer, self.guards, self.precision = training_step, optimizer, guards, precision
        self.schedule = Schedule(optimizer) if schedule is None else schedule
        self.ema, self.exchange = ema, Exchange() if exchange is None else exchange
        self.history, self.patches, self.held = History(), Patches(), Held()
        self._find_parameters()
        self.transaction = Transaction(model, self.parameters)
        self.audit = Audit(model, optimizer, self.transaction, ema)
        self.device = precision.device
        self.bounds = Bounds(self.device)
        self.index = 0
        """Index of the step that was begun last."""
        self.stage = Stage.BETWEEN
        self.window_length = 0
        """Micro-batches of the step that was begun last."""
        self.num_pending = 0
        """Steps applied whose numbers the host does not know yet; the step being attempted comes after them."""
        self.careful_steps = 0
        """Steps left whose update is audited before it is kept, after one has made the state non-finite."""
        self.unlogged: list[str] | None = None
        """Names of what the first forward returned that cannot be logged as a metric; None before it."""
        self.auxiliary_modules: list[nn.Module] = []
        """Modules that take part in a step without being part of the model: a loss with buffers, say."""
        self._replays_graphs = replays_graphs(model)
        self.stateful: dict[str, Stateful] = {}
        """Further parts that are saved and restored with the step's own."""
        self.blind_spot: Callable[[], str] = str
        """For people: which part of a step a replay cannot run, if there is one."""
        self._first: FirstStep | None = FirstStep(self)

    def _find_parameters(self) -> None:
        self.groups, self._members = [g["params"] for g in self.optimizer.param_groups], members_of(self.optimizer)
        self.parameters = all_parameters(self.model, self.optimizer)
        self._is_uniform = gradients.are_uniform(self.parameters)

    @property
    def next_index(self) -> int:
        """Of the next step to begin; refused steps count."""
        return self.history.step + self.num_pending

    def include(self, modules: Iterable[nn.Module]) -> None:
        """Auxiliary modules: what a step writes to them is undone with it."""
        self.auxiliary_modules = list(modules)
        for module in self.auxiliary_modules:
            place(module, self.device)
        self.transaction.include(self.auxiliary_modules)

    @property
    def written_in_forward(self) -> set[str]:
        """Names of the parameters that a forward pass was seen to write to."""
        return self.transaction.written_parameters

    @property
    def nonfinite_by_design(self) -> set[str]:
        return self.transaction.nonfinite_by_design

    def to_replay(self) -> tuple[nn.Module, Optimizer | None]:
        """What forensics runs the step on; everything comes back as it was."""
        return self.called, self.optimizer

    def bad_state(self) -> dict[str, str]:
        """Names of the non-finite parameters, optimizer state and buffers. Reads everything to the host."""
        return self.audit.bad_state()

    # ---- begin and attempt -------------------------------------------------------------------------------------

    def begin(self, window: Sequence[Any]) -> None:
        """Remember all that forward and backward may change."""
        if members_of(self.optimizer) != self._members or self.transaction.has_other_modules:  # a hook has changed some
            self._find_parameters()
            self.transaction.look_again()
        self.index, self.window_length, self.stage = self.next_index, len(window), Stage.ATTEMPT
        self.exchange.begin()
        start = perf_counter()
        self.transaction.begin(window)
        self.guards.begin(self.index, self.history.consecutive_refusals)
        self.history.guard_seconds += perf_counter() - start

    def attempt(
        self, window: Sequence[Any], watch: AttemptWatch | None = None, divisor: int | None = None
    ) -> Measurement:
        """Forward and backward for each micro-batch, then measure. One process reads nothing to the host here.

        The gradient is that of the mean loss, or of the sum of the losses over `divisor`.
        """
        exchange, losses, metrics = self.exchange, [], []
        divisor = len(window) if divisor is None else divisor  # a window at the end of an epoch may be short
        try:
            exchange.begin_attempt(self, window)
            for index, batch in enumerate(window):
                is_last = index == len(window) - 1
                if watch is not None:
                    watch.forward(index)
                with exchange.gradient_sync(self.called, is_last), self.patches.scope, self.bounds.checked(window):
                    loss, metric = self.forward(batch)
                    losses.append(loss.detach())
                    metrics.append(metric)
                    if self._first is not None and index == 0:
                        self._first.check_forward(loss, window)
                    exchange.before_backward(self, losses, metrics, window, is_last)
                    if watch is not None:
                        watch.backward(losses[-1])
                    self.precision.backward(loss if divisor == 1 else loss / divisor)
            self.transaction.notice_writes()
            if self._first is not None:
                self._first = self._first.check_backward()
        except Exception as error:
            exchange.stand_in(self, error, window)
        return self.measure(window, losses, metrics)

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Loss and metrics of one micro-batch."""
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self.precision.autocast():
            output = self.training_step(self.called, same_nest(batch))
        loss, metrics = split_loss(output, "training_step")
        if self.unlogged is None:
            self.unlogged = unlogged_values(output)
        if not loss.requires_grad and torch.is_grad_enabled():
            raise no_graph("training_step")
        return kept(loss, metrics) if self._replays_graphs else (loss, metrics)

    # ---- measure and judge -------------------------------------------------------------------------------------

    def measure(
        self, window: Sequence[Any], losses: Sequence[Tensor], metrics: Sequence[dict[str, Any]]
    ) -> Measurement:
        """Losses, gradient norm, and what the guards ask for; all of it stays on the device."""
        self.precision.unscale(self.optimizer, self.parameters)
        if self.held:
            self.held.apply(self)
        grads = gradients.collect(self.parameters)
        norm = gradients.global_norm(grads, self._is_uniform).to(self.device)
        start = perf_counter()
        measurement = self.exchange.measured(self, self.on_device(window, losses, norm, grads), losses, metrics)
        measurement.limits = self.guards.limits()
        self.history.guard_seconds += perf_counter() - start
        return measurement

    def on_device(
        self, window: Sequence[Any], losses: Sequence[Tensor], norm: Tensor, grads: Sequence[Tensor] = ()
    ) -> DeviceStep:
        """What guards measure."""
        loss = losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
        return DeviceStep(self.index, loss, norm, grads, self.transaction.buffer_peak, self.audit.state_peak, window)

    def view(self, measurement: Measurement) -> StepView:
        """The step's numbers on the host. The one read of a healthy step is here."""
        return views.of_measurement(self, measurement)

    def view_of_error(self, error: Exception, window: Sequence[Any]) -> StepView:
        """The view of a step whose forward or backward raised."""
        return views.of_error(self, error, window)

    def judge(self, view: StepView) -> Decision:
        """Every guard's verdict, merged; the same on all ranks."""
        start = perf_counter()
        decision = self.guards.judge(view)
        self.history.guard_seconds += perf_counter() - start
        if view.error is not None and not any(
            v.reason and str(view.error) in v.reason for v in decision.verdicts.values()
        ):
            reason = f"{type(view.error).__name__}: {view.error}"
            refusal = Verdict(Action.SKIP, reason=reason, evidence={"signal": "exception", "value": math.nan})
            decision = merge([*decision.verdicts.items(), ("loop", refusal)])
        return self.exchange.agree(self, decision, view)

    def explains(self, view: StepView) -> bool:
        """Whether what forward or backward raised is a refused step, and not an error of the program."""
        assert view.error is not None
        return is_numeric(view.error) or self.guards.explain(view) or views.is_raised_by_numbers(self, view)

    # ---- commit or undo ----------------------------------------------------------------------------------------

    def commit(self, measurement: Measurement, view: StepView, decision: Decision) -> Outcome:
        """Apply the step, and let the guards learn from it."""
        if view.scaler_overflow:
            self.transaction.restore()
            self.precision.update_scale()
            self.clear_gradients()
            return Outcome.OVERFLOWED
        before = Copy().take(TrainState.gather(self)) if self.careful_steps else None
        self.update(measurement, view, decision.lr_scale)
        if before is not None:
            if self.exchange.any_rank(bool(self.audit.bad_state())):
                before.restore_training(self)
                self.transaction.expect_weights()
                return Outcome.RUINED
            self.careful_steps -= 1
        self.advance()
        self.learn(view, decision)
        return Outcome.COMMITTED

    def update(self, measurement: Measurement, view: StepView | None, lr_scale: float) -> None:
        """Clip the gradients, then step the optimizer. Without a `view` the host does not know the numbers, and reads none."""
        self.stage = Stage.MOVING
        gradients.clip(self.groups, self.parameters, measurement.limits, measurement.grad_norm, view)
        with scaled_lr(self.optimizer, lr_scale), self.patches.scope:
            self.move()

    def move(self) -> None:
        """The optimizer's own step."""
        self.optimizer.step()

    def advance(self, refused: Tensor | None = None) -> None:
        """Move what goes with the weights: loss scale, schedule, EMA. `refused` (0-d bool): whether they did is known on the device only."""
        self.precision.update_scale()
        self.schedule.step()
        if self.ema is not None:
            self.ema.update(refused)
        self.clear_gradients()
        self.stage = Stage.BETWEEN

    def learn(self, view: StepView, decision: Decision) -> None:
        """Guards update their baselines, from committed steps only."""
        start = perf_counter()
        self.guards.learn(view, decision)
        self.history.guard_seconds += perf_counter() - start

    def refusal_of_ruined(self, view: StepView) -> Decision:
        """The refusal of a step whose update was taken back."""
        action = Action.SKIP if view.consecutive_refusals + 1 < 10 else Action.STOP
        reason = f"loss and gradient are finite, but the update by {type(self.optimizer).__name__} makes the state non-finite"
        return merge([("update", Verdict(action, reason=reason, evidence={"signal": "update", "value": math.nan}))])

    def undo(self, loss_scale: float) -> None:
        """Undo the step: what its forward pass wrote, the loss scale, the gradients."""
        self.transaction.restore()
        self.precision.keep_scale(loss_scale)
        self.clear_gradients()
        self.stage = Stage.BETWEEN

    def clear_gradients(self) -> None:
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad()  # it keeps more than gradients: those of each sample
        for parameter in self.parameters:
            parameter.grad = None

    # ---- for recovery: the step that was begun, once more ------------------------------------------------------

    def retry(self, window: Sequence[Any], refused: StepView) -> tuple[StepView, Decision] | None:
        """Attempt the step once more with this window, from the same random state; commit it if every guard lets it pass."""
        for _ in range(MAX_OVERFLOWS):
            self.transaction.rewind()
            try:
                with self.bounds.thorough():
                    measurement = self.attempt(window)
            except Exception:  # the refused attempt raised it already, and it is in the incident
                break
            view = replace(self.view(measurement), refused_loss=refused.loss)
            decision = self.judge(view).undoubted
            if decision.action is not Action.COMMIT:
                break
            outcome = self.commit(measurement, view, decision)
            if outcome is Outcome.COMMITTED:
                return view, decision
            if outcome is Outcome.RUINED:
                break
        self.undo(refused.loss_scale)
        return None
