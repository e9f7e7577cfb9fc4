"""The training loop: every step is a transaction that commits whole or never happened.

    begin ─ data ─ forward/backward ─ measure ─ judge ─┬─ commit   weights, moments, schedule, buffers move
                                                        └─ refuse   nothing moved; an incident exists

Only the trainer moves weights, schedule, data cursor and random state. `run_step` reads from top to bottom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from . import assembly, gradients
from .checkpoint import save_weights
from .deferred import DeferredCommits
from .engine import deterministic_algorithms
from .errors import Interrupted, SafetrainError, TrainingStopped, UsageError
from .evaluation import evaluate, is_better
from .hooks import check_hooks
from .measure import Measurement
from .parts import TrainerParts
from .result import FitResult
from .rng import RandomState
from .run import Run
from .verdict import Action, Decision, Verdict, merge
from .view import DeviceStep, Limits, StepView, tightest


class SafeTrainer(TrainerParts):
    """Trains a model so that no bad step is ever applied.

    Use it as it is, from a config, or subclass it; the hooks that a subclass may define are those of `TrainerParts`.
    """

    _run: Run | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_hooks(cls, SafeTrainer)

    @property
    def run(self) -> Run:
        if self._run is None:
            raise UsageError("there is no run yet.\nTo fix: call fit() first.")
        return self._run

    @property
    def step(self) -> int:
        """Index of the step being attempted."""
        return self.run.step + self._num_pending

    @property
    def _num_pending(self) -> int:
        """Steps done on the device whose numbers have not reached the host."""
        return self._deferred.num_pending if self._deferred else 0

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self) -> FitResult:
        """Train until `loop.max_steps` or `loop.max_epochs`. Raises TrainingStopped when a guard stops the run."""
        if self._run is not None:
            raise UsageError("fit() was already called on this trainer.\nTo fix: make a new SafeTrainer for a new run.")
        self._run = Run(self.config, self._run_dir, self.engine.rank)
        with self.run.recorded(), self._prepared():
            while not self._finished():
                window = self.stream.take(self.config.loop.grad_accum)
                if window:
                    self.run_step(window)
                    self._evaluate_if_due(epoch_ended=False)
                else:
                    self._end_epoch()
                if self.run.signal is not None:
                    self._save()
                    raise Interrupted(self.run.signal, self.run.result)
            self._evaluate_if_due(run_ended=True)
            self._save()
        return self.run.result

    def run_step(self, window: Sequence[Any]) -> None:
        """One optimizer step over a window of micro-batches, as a transaction."""
        self.transaction.begin()
        for guard in self.guards:
            guard.begin(self.step, self.run.consecutive_refusals)
        try:
            measurement, limits = self._attempt(window)
        except Exception as error:
            if not self._refuse_error(error, window):
                raise
            return
        if self._deferred is not None:
            self._deferred.commit(measurement, limits, window)
            return
        view = self._view(measurement, limits)
        decision = self._judge(view)
        if decision.action is not Action.COMMIT and decision.salvage:
            measurement, view, decision = self._leave_out_bad_micro_batches(window, measurement, view, decision)
        if decision.action is Action.COMMIT:
            self._commit(measurement, view, decision)
        else:
            self._refuse(view, decision, window)

    def _attempt(self, window: Sequence[Any]) -> tuple[Measurement, Limits]:
        """Forward and backward for each micro-batch, then measure. Nothing is read to the host."""
        losses, metrics = [], []
        for index, batch in enumerate(window):
            with self.engine.gradient_sync(self._called_model, sync=index == len(window) - 1):
                loss, beside = self._forward(batch)
                # A short window at the end of an epoch is averaged over what it holds.
                self.engine.backward(loss if len(window) == 1 else loss / len(window))
            losses.append(loss.detach())
            metrics.append(beside)
        return self._measure(losses, metrics, window)

    def _forward(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        with self.engine.autocast():
            output = self.training_step(self._called_model, batch)
        loss, metrics = assembly.split_loss(output, "training_step")
        assembly.check_graph(loss, "training_step")
        return loss, metrics

    def _measure(
        self, losses: list[Tensor], metrics: list[dict[str, Any]], window: Sequence[Any]
    ) -> tuple[Measurement, Limits]:
        self.engine.unscale(self.optimizer)
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
        """Every guard's verdict, merged. Refusals are bounded by a budget, and nothing bad is accepted when it is spent."""
        verdicts = [(guard.name, guard.verdict(view)) for guard in self.guards]
        if view.error is not None and not any(str(view.error) in verdict.reason for _, verdict in verdicts):
            verdicts.append(("loop", Verdict(Action.SKIP, reason=f"{type(view.error).__name__}: {view.error}")))
        decision = merge(verdicts)
        if decision.action is Action.COMMIT:
            return decision
        budget = self.config.recovery.max_refusals
        if self.run.num_refusals >= budget:
            reason = f"{self.run.num_refusals + 1} refused steps in this run, recovery.max_refusals is {budget}"
            verdicts.append(("budget", Verdict(Action.STOP, reason=reason)))
        elif decision.action is Action.ROLLBACK:
            reason = "a rollback was asked for and there is no snapshot to go back to"
            verdicts.append(("recovery", Verdict(Action.STOP, reason=reason)))
        return merge(verdicts)

    def _commit(self, measurement: Measurement, view: StepView, decision: Decision) -> None:
        if view.scaler_overflow:  # the scaler's own way of skipping: it lowers its scale and nothing else moves
            self.transaction.restore()
            self.engine.update_scale()
            self._clear_gradients()
            self.run.stepped(view, decision, "overflow", self.stream.epoch)
            return
        gradients.clip(self._groups, self._parameters, view.limits, measurement.grad_norm, view)
        with self.scaled_lr(decision.lr_scale):
            self.optimizer.step()
        self.engine.update_scale()
        self.advance_schedule()
        if self.ema is not None:
            self.ema.update()
        self._clear_gradients()
        self.committed(view, decision)

    def committed(self, view: StepView, decision: Decision) -> None:
        """Learn from a step that was applied, and tell of it."""
        for guard in self.guards:
            guard.learn(view, decision)
        self.run.stepped(view, decision, "commit", self.stream.epoch)
        self.on_commit(view)

    def _refuse(self, view: StepView, decision: Decision, window: Sequence[Any]) -> None:
        self.transaction.restore()
        self.engine.keep_scale(view.loss_scale)
        self._clear_gradients()
        self.refused(view, decision, window, self.transaction.random_state)

    def _refuse_error(self, error: Exception, window: Sequence[Any]) -> bool:
        """Forward or backward raised. If a guard knows why, that is a refused step; if none does, it is the user's error."""
        if isinstance(error, SafetrainError):
            return False  # it says itself what to do
        if self.engine.world_size > 1:
            return False  # the other ranks are in a collective that this one has left
        self._settle()
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
        if not any(guard.explains(view) for guard in self.guards):
            return False
        self._refuse(view, self._judge(view), window)
        return True

    def refused(self, view: StepView, decision: Decision, window: Sequence[Any], random_state: RandomState) -> None:
        """Tell of a step that was not applied, and stop if that was the verdict."""
        self.run.stepped(view, decision, str(decision.action), self.stream.epoch)
        incident = self.run.incident(view, decision, window, random_state)
        self.on_incident(incident)
        if decision.action is Action.STOP:
            raise TrainingStopped(incident, self.run.result)

    def _leave_out_bad_micro_batches(
        self, window: Sequence[Any], measurement: Measurement, view: StepView, decision: Decision
    ) -> tuple[Measurement, StepView, Decision]:
        """Try the window again as if its non-finite micro-batches had never been in it."""
        self.engine.keep_scale(view.loss_scale)
        bad = self._bad_micro_batches(window)
        kept = [batch for index, batch in enumerate(window) if index not in bad]
        if not bad or not kept:
            return measurement, view, decision
        self.transaction.rewind()
        measurement, limits = self._attempt(kept)
        second_view = self._view(measurement, limits)
        second = self._judge(second_view)
        if second.action is Action.COMMIT:
            reason = f"micro-batch {', '.join(map(str, bad))} of {len(window)} left out (counted from 0)"
            noted = Decision(Action.COMMIT, second.lr_scale, {**decision.verdicts, "loop": Verdict(reason=reason)})
            self.on_incident(self.run.incident(view, noted, window, self.transaction.random_state))
        return measurement, second_view, second

    def _bad_micro_batches(self, window: Sequence[Any]) -> list[int]:
        self._clear_gradients()
        self.transaction.rewind()
        finite = []
        for batch in window:
            with self.engine.gradient_sync(self._called_model, sync=False):
                loss, _ = self._forward(batch)
                self.engine.backward(loss / len(window))
            finite.append(torch.isfinite(loss.detach() + gradients.global_norm(gradients.collect(self._parameters))))
            self._clear_gradients()
            self.transaction.restore()
        shares = self.engine.share(torch.stack(finite).float()).tolist()
        return [index for index, share in enumerate(shares) if share < 1.0]

    # ---- around the steps --------------------------------------------------------------------------------------

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Hooks of the guards installed, the run announced; everything taken off again at the end."""
        with ExitStack() as stack:
            stack.callback(self.stream.close)
            if self.config.loop.deterministic:
                stack.enter_context(deterministic_algorithms())
            for guard in self.guards:
                if (remove := guard.attach(self.model)) is not None:
                    stack.callback(remove)
            if self.config.loop.host_read_every > 1:
                self._deferred = stack.enter_context(DeferredCommits(self))
            self.run.telemetry.started(
                {
                    "name": self.config.name,
                    "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
                    "device": str(self.engine.device),
                    "precision": self.engine.precision,
                    "world_size": self.engine.world_size,
                    "guards": [guard.name for guard in self.guards],
                    "run_dir": self.run.dir,
                }
            )
            yield

    def _finished(self) -> bool:
        loop = self.config.loop
        if loop.max_steps is not None:
            if self.run.result.steps + self._num_pending >= loop.max_steps:
                self._settle()
            if self.run.result.steps >= loop.max_steps:
                return True
        max_epochs = loop.max_epochs if loop.max_epochs is not None or loop.max_steps is not None else 1
        return max_epochs is not None and self.stream.epoch >= max_epochs

    def _end_epoch(self) -> None:
        self._settle()
        self.stream.next_epoch()
        self.run.result.epochs += 1
        self._evaluate_if_due(epoch_ended=True)

    def _settle(self) -> None:
        """Bring deferred steps to the host, so that all that was done is known."""
        if self._deferred is not None:
            self._deferred.settle()

    def _evaluate_if_due(self, epoch_ended: bool = False, run_ended: bool = False) -> None:
        if self._eval_stream is None:
            return
        every, done = self.config.loop.eval_every, self.run.result
        if every is not None and (done.steps + self._num_pending) // every > self._evaluated_at // every:
            self._settle()  # some of the pending steps may turn out to have been refused
        due = epoch_ended if every is None else done.steps // every > self._evaluated_at // every
        if not (due or run_ended) or done.steps == self._evaluated_at:
            return
        self._evaluated_at = done.steps
        with self.ema.swapped_in() if self.ema is not None else ExitStack():
            metrics = evaluate(self.model, self._evaluation_batch, self._eval_stream)
        loop = self.config.loop
        self.run.evaluated(metrics, is_better(metrics, done.best, loop.monitor, loop.monitor_mode))
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics[loop.monitor])

    def _evaluation_batch(self, batch: Any) -> Any:
        # Not through the distributed wrapper: its collectives would have to match on all ranks.
        model = self._called_model if self.engine.world_size == 1 else self.model
        with self.engine.autocast():
            return self.evaluation_step(model, batch)

    def _save(self) -> None:
        """Write the final weights, unless the state they are part of is not finite: then stop loudly instead."""
        self._settle()
        if bad := self.audit.bad_state():
            what = ", ".join(f"{name} ({problem})" for name, problem in list(bad.items())[:5])
            verdict = Verdict(
                Action.STOP,
                reason=f"the training state is not finite and was not saved: {what}",
                evidence={"signal": "state", "value": math.nan, "bad_state": bad},
            )
            view = StepView(step=max(self.run.step - 1, 0), loss=self.run.result.final_loss, grad_norm=math.nan)
            incident = self.run.incident(view, merge([("audit", verdict)]), [], None)
            self.on_incident(incident)
            raise TrainingStopped(incident, self.run.result)
        if self.config.checkpoint.save_final and self.run.dir is not None:
            save_weights(self.run.dir / "checkpoints", self.model, self.ema)

    # ---- moving parts ------------------------------------------------------------------------------------------

    def scheduled_lrs(self) -> tuple[float, ...]:
        return tuple(float(group.get("lr", 0.0)) for group in self.optimizer.param_groups)

    @contextmanager
    def scaled_lr(self, scale: float) -> Iterator[None]:
        """Outside the scheduler, which would overwrite (or compound) a change it finds in the groups."""
        groups = [group for group in self.optimizer.param_groups if scale != 1.0 and "lr" in group]
        scheduled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * scale
        try:
            yield
        finally:
            for group, lr in zip(groups, scheduled, strict=True):
                group["lr"] = lr

    def advance_schedule(self) -> None:
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
