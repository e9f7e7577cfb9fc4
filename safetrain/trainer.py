"""The training loop: every step is a transaction that commits whole or never happened.

    begin ─ data ─ forward/backward ─ measure ─ judge ─┬─ commit   weights, moments, schedule, buffers move
                                                        └─ refuse   nothing moved; an incident exists

Only the trainer moves weights, schedule, data cursor and random state. `run_step` reads from top to bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import assembly, gradients
from .batch import same_nest
from .errors import Interrupted, SafetrainError, TrainingStopped, UsageError
from .forensics.raised import is_numeric
from .hooks import check_hooks
from .measure import Measurement
from .recovery import Case, LastGood
from .recovery.bench import Workbench
from .result import FitResult
from .rng import RandomState
from .run import Run
from .session import TrainerSession
from .snapshots import Copy
from .state import TrainState
from .verdict import Action, Decision, Verdict, merge
from .view import DeviceStep, Limits, StepView, tightest


class SafeTrainer(TrainerSession):
    """Trains a model so that no bad step is ever applied.

    Use it as it is, from a config, or subclass it; the hooks that a subclass may define are those of `TrainerParts`.
    """

    _checked_backward = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls, SafeTrainer)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self, resume: bool | str = False) -> FitResult:
        """Train until `loop.max_steps` or `loop.max_epochs`. Raises TrainingStopped when a guard stops the run.

        With `resume=True` go on exactly where the run in `run_dir` was: build the trainer as for the first call, from the same
        model, data and config. "auto": resume if `run_dir` holds a run, else start one. "force": also with a config that
        changes the training itself; the optimizer's settings are then still those that were saved.
        """
        if self._run is not None:
            raise UsageError("fit() was already called on this trainer.\nTo fix: make a new SafeTrainer for a new run.")
        self._run = Run(self.config, self._run_dir, self.engine.rank, resume)
        self.bench = Workbench(self)
        with self.run.recorded(), self._prepared() as keeper:
            keeper.begin()
            while not self._finished():
                window = self._next_window()
                if window:
                    self.run_step(window)
                    self._evaluate_if_due(epoch_ended=False)
                elif self.run.signal is None:
                    self._end_epoch()
                keeper.after_step()
                if self._schedule_error is not None and not self._finished():
                    keeper.save(required=True)
                    raise UsageError(
                        f"the schedule {type(self.scheduler).__name__} failed after step {self.step - 1}: {self._schedule_error}\n"
                        "To fix: make it for as many steps as the run takes (loop.max_steps)."
                    ) from self._schedule_error
                if self.run.signal is not None:
                    keeper.save(required=True)
                    raise Interrupted(self.run.signal, self.run.result)
                if self.run.out_of_time and not self._finished():
                    keeper.save(required=True)
                    self.run.result.status = "paused"
                    return self.run.result
            self._evaluate_if_due(run_ended=True)
            keeper.finish()
        return self.run.result

    def run_step(self, window: Sequence[Any]) -> None:
        """One optimizer step over a window of micro-batches, as a transaction."""
        if len(self.optimizer.param_groups) != len(self._groups):  # a hook has given it more to train
            self._find_parameters()
        self.transaction.begin(window)
        for guard in self.guards:
            guard.begin(self.step, self.run.consecutive_refusals)
        try:
            measurement, limits = self._attempt(window)
        except Exception as error:
            if not self._refuse_error(error, window):
                raise
            return
        if self._deferred is not None and self._deferred.commit(measurement, limits, window):
            return
        view = self._view(measurement, limits)
        decision = self._judge(view)
        if decision.action is Action.COMMIT:
            if self._commit(measurement, view, decision, window):
                return
            decision = self._bad_update(view)
        self._undo(view)
        self.refused(view, decision, window, self.transaction.random_state)

    def _attempt(self, window: Sequence[Any]) -> tuple[Measurement, Limits]:
        """Forward and backward for each micro-batch, then measure. Nothing is read to the host."""
        losses, metrics = [], []
        for index, batch in enumerate(window):
            with self.engine.gradient_sync(self._called_model, sync=index == len(window) - 1), self.patches:
                loss, beside = self._forward(batch)
                if not self._checked_backward and index == 0:
                    assembly.check_no_backward(self._parameters)
                # A short window at the end of an epoch is averaged over what it holds.
                self.engine.backward(loss if len(window) == 1 else loss / len(window))
            losses.append(loss.detach())
            metrics.append(beside)
        self.transaction.notice_writes()
        if not self._checked_backward:
            assembly.check_reached(self.optimizer)
            self._checked_backward = True
        return self._measure(losses, metrics, window)

    def _forward(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        with self.engine.autocast():
            output = self.training_step(self._called_model, same_nest(batch))
        loss, metrics = assembly.split_loss(output, "training_step")
        if torch.is_grad_enabled():
            assembly.check_graph(loss, "training_step")
        return loss, metrics

    def _measure(
        self, losses: list[Tensor], metrics: list[dict[str, Any]], window: Sequence[Any]
    ) -> tuple[Measurement, Limits]:
        self.engine.unscale(self.optimizer, self._parameters)
        grads = gradients.collect(self._parameters)
        norm = gradients.global_norm(grads).to(self.engine.device)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        step = DeviceStep(self.step, loss, norm, grads, self.transaction.buffer_peak, self.audit.state_peak, window)
        signals = {f"{g.name}.{name}": value for g in self.guards for name, value in g.measure(step).items()}
        measurement = Measurement(losses, norm, self.engine.loss_scale(), signals, metrics, window)
        measurement.vector = self.engine.share(measurement.vector)
        return measurement, tightest(guard.limits() for guard in self.guards)

    def _view(self, measurement: Measurement, limits: Limits) -> StepView:
        """The step's numbers on the host. The one read of a healthy step is here."""
        numbers = measurement.unpack(measurement.vector.tolist())
        norm_overflow = False
        if math.isinf(numbers["grad_norm"]):
            true_norm = gradients.overflow_free_norm(gradients.collect(self._parameters))
            if norm_overflow := true_norm is not None:
                numbers["grad_norm"] = true_norm
        scaler_overflow = (
            self.engine.precision == "fp16"
            and math.isfinite(numbers["loss"])
            and not math.isfinite(numbers["grad_norm"])
        )
        return StepView(
            step=self.step,
            lrs=self.scheduled_lrs(),
            limits=limits,
            norm_overflow=norm_overflow,
            scaler_overflow=scaler_overflow,
            **numbers,
            **self.run.history(scaler_overflow),
            bad_state=self.audit.bad_state_before_step,
        )

    def _judge(self, view: StepView) -> Decision:
        """Every guard's verdict, merged."""
        verdicts = [(guard.name, guard.verdict(view)) for guard in self.guards]
        if view.error is not None and not any(str(view.error) in verdict.reason for _, verdict in verdicts):
            evidence = {"signal": "exception", "value": math.nan}
            reason = f"{type(view.error).__name__}: {view.error}"
            verdicts.append(("loop", Verdict(Action.SKIP, reason=reason, evidence=evidence)))
        return merge(verdicts)

    def _commit(self, measurement: Measurement, view: StepView, decision: Decision, window: Sequence[Any]) -> bool:
        """Apply the step. False: its update would have ruined the state, and was taken back (looked for after trouble only)."""
        if view.scaler_overflow:  # the scaler's own way of skipping: it lowers its scale and nothing else moves
            self.transaction.restore()
            self.engine.update_scale()
            self._clear_gradients()
            self.run.stepped(view, decision, "overflow", self.stream.epoch)
            return True
        gradients.clip(self._groups, self._parameters, view.limits, measurement.grad_norm, view)
        before = Copy().take(TrainState.gather(self, progress=False)) if self.careful_steps else None
        with self.scaled_lr(decision.lr_scale), self.patches:
            self.optimizer.step()
        if before is not None:
            if self.audit.bad_state():
                before.restore_training(self)
                self.transaction.expect_weights()
                return False
            self.careful_steps -= 1
        self.engine.update_scale()
        self.advance_schedule()
        if self.ema is not None:
            self.ema.update()
        self._clear_gradients()
        self._remember_good(self.transaction.window_before(window), view.loss)
        self.committed(view, decision)
        return True

    def _bad_update(self, view: StepView) -> Decision:
        action = Action.SKIP if view.consecutive_refusals + 1 < 10 else Action.STOP
        reason = f"loss and gradient are finite, but the update by {type(self.optimizer).__name__} makes the state non-finite"
        return merge([("update", Verdict(action, reason=reason, evidence={"signal": "update", "value": math.nan}))])

    def committed(self, view: StepView, decision: Decision) -> None:
        """Learn from a step that was applied, and tell of it."""
        for guard in self.guards:
            guard.learn(view, decision)
        self.run.stepped(view, decision, "commit", self.stream.epoch)
        self.on_commit(view)

    def _remember_good(self, window: Sequence[Any], loss: float) -> None:
        self.last_good = LastGood(window, loss) if self.last_good is None else self.last_good.followed_by(window, loss)

    def _undo(self, view: StepView) -> None:
        """As if the step had never been: what its forward pass wrote, the loss scale, the gradients."""
        self.transaction.restore()
        self.engine.keep_scale(view.loss_scale)
        self._clear_gradients()

    def _refuse_error(self, error: Exception, window: Sequence[Any]) -> bool:
        """Forward or backward raised. If a guard knows why, that is a refused step; if none does, it is the user's error."""
        if isinstance(error, SafetrainError):
            return False  # it says itself what to do
        if self.engine.world_size > 1:
            return False  # the other ranks are in a collective that this one has left
        random_state = self.transaction.random_state
        self.transaction.restore()
        self._clear_gradients()
        went_back = self._settle()
        scale = self.engine.loss_scale()
        view = StepView(
            step=self.step,
            loss=math.nan,
            grad_norm=math.nan,
            lrs=self.scheduled_lrs(),
            loss_scale=1.0 if scale is None else float(scale),
            **self.run.history(False),
            bad_state=self.audit.bad_state_before_step,
            window=lambda: window,
            error=error,
        )
        if not (is_numeric(error) or any(guard.explains(view) for guard in self.guards)):
            return False
        if went_back and self._deferred is not None:
            self._deferred.tell_undone(view)
            return True
        self.engine.keep_scale(view.loss_scale)
        self.transaction.begin(window)
        self.transaction.random_state = random_state
        self.refused(view, self._judge(view), window, random_state)
        return True

    def refused(
        self,
        view: StepView,
        decision: Decision,
        window: Sequence[Any],
        random_state: RandomState,
        is_late: bool = False,
    ) -> Action:
        """Find out why, then climb the recovery ladder: repair and commit the step, skip it, go back, or stop."""
        if is_late:
            self.transaction.begin()  # what a replay disturbs goes back to here, not to before the newest step
        nothing_learned = self.last_good is not None and self.last_good.nothing_learned
        incident = self.run.open_incident(view, decision)
        case = Case(view, decision, window, random_state, incident, is_late, nothing_learned=nothing_learned)
        self.bench.investigate(case)
        self.transaction.restore(replayed=True)
        if self.bench.absolve(case):
            return Action.COMMIT
        self.bench.keep_replay(case)
        return self._resolve(case)

    def distrusted(self, verdict: Verdict) -> None:
        """Between two steps the state itself was found to be wrong: go back, or stop."""
        self.transaction.begin()
        loss = self.run.result.final_loss
        view = StepView(max(self.run.step - 1, 0), loss, math.nan, **self.run.history(False))
        self.resolve_between_steps(view, merge([("audit", verdict)]))

    def resolve_between_steps(self, view: StepView, decision: Decision) -> None:
        """Climb the ladder for what is wrong after a step that was committed."""
        incident = self.run.open_incident(view, decision)
        self._resolve(Case(view, decision, [], self.transaction.random_state, incident, is_step=False))

    def _resolve(self, case: Case) -> Action:
        settlement = self.bench.count_samples(case, self.ladder.settle(case, self.bench))
        self.run.close_incident(case, settlement, self.stream.epoch)
        self.on_incident(case.incident)
        if settlement.action is Action.STOP:
            raise TrainingStopped(case.incident, self.run.result) from case.view.error
        return settlement.action
