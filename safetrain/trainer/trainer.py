"""The training loop: every step is a transaction that commits whole or never happened.

    begin ─ data ─ forward/backward ─ measure ─ judge ─┬─ commit   weights, moments, schedule, buffers move
                                                        └─ refuse   nothing moved; an incident exists

Only the trainer moves weights, schedule, data cursor and random state. `run_step` reads from top to bottom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.snapshots import Copy
from ..checkpoint.state import TrainState
from ..core.incident import STATE_AUDIT
from ..core.loss import check_graph, left_aside, split_loss
from ..core.protocols import check_hooks
from ..core.result import FitResult
from ..core.verdict import Action, Decision, Verdict, merge
from ..core.view import DeviceStep, Limits, StepView
from ..errors import Interrupted, SafetrainError, TrainingStopped, UsageError
from ..forensics.raised import is_numeric
from ..guards.guard_set import Panel
from ..recovery import Case, LastGood
from ..recovery.repairs import Workbench
from ..step.measurement import Measurement
from ..tensors import gradients
from ..tensors.nest import same_nest
from ..tensors.rng import RandomState
from . import build as assembly
from .run import Run
from .session import TrainerSession


class SafeTrainer(TrainerSession):
    """Trains a model so that no bad step is ever applied.

    Use it as it is, from a config, or subclass it; the hooks that a subclass may define are those of `TrainerParts`.

    >>> data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = SafeTrainer(model, loss_fn=torch.nn.MSELoss(), optimizer=optimizer, train_data=data, config=QUIET)
    >>> trainer.fit().final_loss < 0.5
    True
    """

    _checked_backward = False
    _told_left_aside = False

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
        with self._among_ranks(), self.run.recorded(), self._prepared() as keeper:
            keeper.begin()
            while not self._finished():
                window = self._next_window()
                if window:
                    self.run_step(window)
                    self._evaluate_if_due(epoch_ended=False)
                elif self._signal is None:
                    self._end_epoch()
                keeper.after_step()
                if self._schedule_error is not None and not self._finished():
                    keeper.save(required=True)
                    raise UsageError(
                        f"the schedule {type(self.scheduler).__name__} failed after step {self.step - 1}: {self._schedule_error}\n"
                        "To fix: make it for as many steps as the run takes (loop.max_steps)."
                    ) from self._schedule_error
                if self._signal is not None:
                    keeper.save(required=True)
                    raise Interrupted(self._signal, self.run.result)
                if self._out_of_time and not self._finished():
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
        if not self.panel.is_of(self.guards):  # one has joined
            self.panel = Panel(self.guards)
        if self.joint is not None:
            self.joint.begin()
        begin = perf_counter()
        self.transaction.begin(window)
        self.panel.begin(self.step, self.run.consecutive_refusals)
        self.run.guard_seconds += perf_counter() - begin
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
        """Forward and backward for each micro-batch, then measure. Nothing is read to the host (by one process)."""
        if self.joint is not None:
            return self.joint.attempt(window)
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
        loss, metrics = split_loss(output, "training_step")
        if not self._told_left_aside and self._run is not None:
            self._told_left_aside = True
            if names := left_aside(output):
                self._run.telemetry.noted(
                    f"not logged, being no numbers: {', '.join(names)} (returned by training_step)"
                )
        if torch.is_grad_enabled():
            check_graph(loss, "training_step")
        return loss, metrics

    def _measure(
        self, losses: list[Tensor], metrics: list[dict[str, Any]], window: Sequence[Any]
    ) -> tuple[Measurement, Limits]:
        self.engine.unscale(self.optimizer, self._parameters)
        grads = gradients.collect(self._parameters)
        norm = gradients.global_norm(grads, self._is_uniform).to(self.engine.device)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        step = DeviceStep(self.step, loss, norm, grads, self.transaction.buffer_peak, self.audit.state_peak, window)
        begin = perf_counter()
        signals = self.panel.measure(step)
        self.run.guard_seconds += perf_counter() - begin
        measurement = Measurement(losses, norm, self.engine.loss_scale(), signals, metrics, window)
        measurement.vector = self.engine.share(measurement.vector)
        return measurement, self.panel.limits()

    def _view(self, measurement: Measurement, limits: Limits) -> StepView:
        """The step's numbers on the host. The one read of a healthy step is here."""
        fields = measurement.unpack(measurement.vector.tolist())
        norm_overflow = False
        if math.isinf(fields["grad_norm"]):
            true_norm = gradients.overflow_free_norm(gradients.collect(self._parameters))
            if norm_overflow := true_norm is not None:
                fields["grad_norm"] = true_norm
        scaler_overflow = (
            self.engine.precision == "fp16" and math.isfinite(fields["loss"]) and not math.isfinite(fields["grad_norm"])
        )
        fields |= self.run.history(scaler_overflow)
        fields |= {
            "step": self.step,
            "epoch": self.stream.epoch,
            "lrs": self.scheduled_lrs(),
            "limits": limits,
            "norm_overflow": norm_overflow,
            "scaler_overflow": scaler_overflow,
            "bad_state": self.audit.bad_state_before_step,
        }
        return StepView(**fields)

    def _judge(self, view: StepView) -> Decision:
        """Every guard's verdict, merged."""
        begin = perf_counter()
        decision = self.panel.judge(view)
        self.run.guard_seconds += perf_counter() - begin
        if view.error is not None and not any(str(view.error) in v.reason for v in decision.verdicts.values()):
            reason = f"{type(view.error).__name__}: {view.error}"
            refusal = Verdict(Action.SKIP, reason=reason, evidence={"signal": "exception", "value": math.nan})
            decision = merge([*decision.verdicts.items(), ("loop", refusal)])
        if self.joint is None or decision.action is Action.COMMIT:
            return decision
        return self.joint.agree(decision, view)

    def _commit(self, measurement: Measurement, view: StepView, decision: Decision, window: Sequence[Any]) -> bool:
        """Apply the step. False: its update would have ruined the state, and was taken back (looked for after trouble only)."""
        if view.scaler_overflow:  # the scaler's own way of skipping: it lowers its scale and nothing else moves
            self.transaction.restore()
            self.engine.update_scale()
            self._clear_gradients()
            self.run.stepped(view, decision, "overflow")
            return True
        if view.limits.bounded:
            gradients.clip(self._groups, self._parameters, view.limits, measurement.grad_norm, view)
        before = Copy().take(TrainState.gather(self, progress=False)) if self.careful_steps else None
        with self.scaled_lr(decision.lr_scale), self.patches:
            self.optimizer.step()
        if before is not None:
            if self.engine.any_rank(bool(self.audit.bad_state())):
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
        begin = perf_counter()
        self.panel.learn(view, decision)
        self.run.guard_seconds += perf_counter() - begin
        self.run.stepped(view, decision, "commit")
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
        if self.joint is None and isinstance(error, SafetrainError):
            return False  # it says itself what to do
        if self.joint is not None and not self.joint.failed_together:
            return self.joint.undo_abandoned(error, window)
        random_state = self.transaction.random_state
        self.transaction.restore()
        self._clear_gradients()
        went_back = self._settle()
        view = self._view_of_error(error, window)
        if not (self._explains(view) if self.joint is None else self.joint.failure_is_explained):
            self._save_for_another_try(window)
            return False
        if went_back and self._deferred is not None:
            self._deferred.tell_undone(view)
            return True
        self.engine.keep_scale(view.loss_scale)
        self.transaction.begin(window)
        self.transaction.random_state = random_state
        self.refused(view, self._judge(view), window, random_state)
        return True

    def _explains(self, view: StepView) -> bool:
        assert view.error is not None
        return is_numeric(view.error) or any(guard.explains(view) for guard in self.guards)

    def _view_of_error(self, error: Exception, window: Sequence[Any]) -> StepView:
        scale = self.engine.loss_scale()
        return StepView(
            step=self.step,
            epoch=self.stream.epoch,
            loss=math.nan,
            grad_norm=math.nan,
            lrs=self.scheduled_lrs(),
            loss_scale=1.0 if scale is None else float(scale),
            **self.run.history(False),
            bad_state=self.audit.bad_state_before_step,
            window=lambda: window,
            error=error,
        )

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
        with self.run.phase("recovery", f"investigating step {view.step}"):
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
        view = StepView(max(self.run.step - 1, 0), loss, math.nan, epoch=self.stream.epoch, **self.run.history(False))
        self.resolve_between_steps(view, merge([(STATE_AUDIT, verdict)]))

    def resolve_between_steps(self, view: StepView, decision: Decision) -> None:
        """Climb the ladder for what is wrong after a step that was committed."""
        incident = self.run.open_incident(view, decision)
        with self.run.phase("recovery", f"recovering after step {view.step}"):
            case = Case(view, decision, [], self.transaction.random_state, incident, is_step=False)
            self.bench.describe_state(case)
            self._resolve(case)

    def _resolve(self, case: Case) -> Action:
        settlement = self.bench.count_samples(case, self.ladder.settle(case, self.bench))
        self.run.close_incident(case, settlement)
        self.on_incident(case.incident)
        if settlement.action is Action.STOP:
            raise TrainingStopped(case.incident, self.run.result) from case.view.error
        return settlement.action
