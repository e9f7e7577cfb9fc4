"""What happens around the steps of a run: setting up and taking down, epochs, evaluation, the schedule, going back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..checkpoint.policy import Keeper
from ..errors import Interrupted, TrainingStopped, UsageError
from ..forensics.sandbox import modules_behind
from ..guards import REGISTRY
from ..recovery.repairs import Workbench
from ..step.deferred import DeferredCommits
from ..step.joint import JointSteps, NoWindow
from ..telemetry.watch import watching
from .engine import deterministic_algorithms
from .evaluation import evaluate, is_better
from .parts import TrainerParts
from .run import Run

if TYPE_CHECKING:
    from ..preflight import CheckReport
    from .trainer import SafeTrainer

_AS_SCHEDULED = nullcontext()


class TrainerSession(TrainerParts):
    """A run of the trainer, without its steps: those are in `SafeTrainer`."""

    _run: Run | None = None
    _at_end: ExitStack
    """Undone when the run ends."""
    _keeper: Keeper
    bench: Workbench
    _schedule_error: Exception | None = None
    joint: JointSteps | None = None
    """The steps that this rank makes together with others; None if there are no others."""

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

    @property
    def _as_trainer(self) -> SafeTrainer:
        return cast("SafeTrainer", self)

    @property
    def _signal(self) -> int | None:
        """The signal that asked the run, on any rank, to end."""
        return self.run.signal if self.joint is None else self.joint.signal

    @property
    def _out_of_time(self) -> bool:
        return self.run.out_of_time if self.joint is None else self.joint.out_of_time

    @contextmanager
    def _among_ranks(self) -> Iterator[None]:
        """What ends this rank is told to the others, and a rank that does not answer is named."""
        link = self.engine.link
        if link is None:
            yield
            return
        self.joint = JointSteps(self._as_trainer)
        try:
            try:
                yield
            except (TrainingStopped, Interrupted):
                self.joint.leave_together()
                raise
            self.joint.leave_together()
        except BaseException as error:
            explained = link.explained(error)
            if explained is not error:
                raise explained from error
            if self.joint.failed_together:
                self.joint.leave_together()
            link.watchdog.failed(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._called_model = self.model  # a live DDP model can hang the end of its process group
            self.engine.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the model is called on this rank only."""
        with self.joint.alone() if self.joint is not None else nullcontext():
            yield

    def _save_for_another_try(self, window: Sequence[Any]) -> None:
        """A rank raised what ends the run. All are still together, so what was learned is saved, before this window."""
        if self.joint is not None:
            self.stream.num_consumed -= len(window)
            self._keeper.save()

    @contextmanager
    def _prepared(self) -> Iterator[Keeper]:
        """Hooks of the guards installed, the run announced; everything taken off again at the end."""
        with ExitStack() as stack:
            self._at_end = stack
            self._keeper = Keeper(self._as_trainer)
            stack.push(lambda kind, error, trace: self._keeper.close(error))
            stack.callback(self.stream.close)
            stack.callback(self.bench.tell_changes)
            if self.config.loop.deterministic:
                stack.enter_context(deterministic_algorithms())
            for guard in self.guards:
                if (remove := guard.attach(self.model)) is not None:
                    stack.callback(remove)
            self.transaction.include(self._modules_beside())
            self._clear_gradients()
            if self.config.loop.host_read_every > 1:
                self._deferred = stack.enter_context(DeferredCommits(self._as_trainer))
            self.run.started(
                {
                    "name": self.config.name,
                    "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
                    "device": str(self.engine.device),
                    "precision": self.engine.precision,
                    "world_size": self.engine.world_size,
                    "guards": [guard.name for guard in self.guards],
                    "run_dir": self.run.dir,
                    "total_steps": self._total_steps(),
                },
                self.stream.caveats() if self.config.checkpoint.enabled else [],
            )
            if self.run.dir is not None and (self.config.logging.tensorboard or self.config.logging.trackers):
                every = self.config.logging.histograms_every
                stack.enter_context(watching(self.model, self.optimizer, self.run.telemetry, lambda: self.step, every))
            yield self._keeper

    def _total_steps(self) -> int | None:
        """How many steps the run will take, if that is known; refused ones come on top."""
        loop = self.config.loop
        by_epochs = None
        if (num_batches := self.stream.num_batches()) is not None:
            epochs = loop.max_epochs or (1 if loop.max_steps is None else None)
            by_epochs = None if epochs is None else epochs * -(-num_batches // loop.grad_accum)
        return min((n for n in (loop.max_steps, by_epochs) if n is not None), default=None)

    def _modules_beside(self) -> list[nn.Module]:
        """Those that a step uses beside the model: its loss, and what a subclass has as attributes."""
        functions = [self.training_step if self._loss_fn is None else self._loss_fn]
        own = [
            value for value in vars(self).values() if isinstance(value, nn.Module) and value is not self._called_model
        ]
        return [*own, *(module for function in functions for module in modules_behind(function))]

    def _finished(self) -> bool:
        loop = self.config.loop
        if loop.max_steps is not None:
            if self.run.result.steps + self._num_pending >= loop.max_steps:
                self._settle()
            if self.run.result.steps >= loop.max_steps:
                return True
        max_epochs = loop.max_epochs if loop.max_epochs is not None or loop.max_steps is not None else 1
        return max_epochs is not None and self.stream.epoch >= max_epochs

    def _next_window(self) -> list[Any]:
        window: list[Any] = []
        try:
            window = self.stream.take(self.config.loop.grad_accum)
        except Exception as error:
            if self.run.signal is None:  # else that has ended the loader's workers too
                if self.joint is None:
                    raise
                window = NoWindow(error)
        if not window and self.joint is not None:
            self.joint.end_of_epoch()
        elif self._keeper.needs_warm_up and self.joint is not None:
            self._keeper.needs_warm_up = False
            self.joint.warm_up(window)
        return window

    def _end_epoch(self) -> None:
        if self._eval_stream is not None:
            self._settle()
        self.stream.next_epoch()
        self.run.result.epochs += 1
        self._evaluate_if_due(epoch_ended=True)

    def _settle(self) -> bool:
        """Bring deferred steps to the host, so that all that was done is known. True: that made the run go back."""
        return self._deferred is not None and self._deferred.settle()

    def _evaluate_if_due(self, epoch_ended: bool = False, run_ended: bool = False) -> None:
        if self._eval_stream is None:
            return
        every, done = self.config.loop.eval_every, self.run.result
        if every is not None and (done.steps + self._num_pending) // every > self._evaluated_at // every:
            self._settle()  # some of the pending steps may turn out to have been refused
        due = epoch_ended if every is None else done.steps // every > self._evaluated_at // every
        if not (due or run_ended) or done.steps == self._evaluated_at:
            return
        loop = self.config.loop
        try:
            with self.run.phase("evaluation", "evaluating"), self.ema.swapped_in() if self.ema else ExitStack():
                self.transaction.begin()
                try:
                    if self.engine.replicas is not None:
                        self.engine.replicas.sync_buffers()  # every rank evaluates the same model
                    metrics = evaluate(self.model, self._evaluation_batch, self._eval_stream, self.engine.link)
                finally:
                    self.transaction.restore()
            is_best = is_better(metrics, done.best, loop.monitor, loop.monitor_mode)
        except Exception:
            self._keeper.save(required=True)  # what was learned is not lost with a mistake in the evaluation
            raise
        self._evaluated_at = done.steps
        self.run.evaluated(metrics, is_best)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics[loop.monitor])

    def _evaluation_batch(self, batch: Any) -> Any:
        # Not through the distributed wrapper: its collectives would have to match on all ranks.
        model = self._called_model if self.engine.world_size == 1 else self.model
        with self.engine.autocast():
            return self.evaluation_step(model, batch)

    def check(self, only: str | Iterable[str] | None = None, budget: float = 10.0) -> CheckReport:
        """Look at data, model and first steps before `fit()`, and leave them as they are; see `safetrain.check`."""
        from ..preflight import check

        return check(self._as_trainer, only, budget)

    def rollback(self, to: str = "trusted", skip_windows: int = 0) -> int:
        """Go back to an earlier state; returns the step it is of. Raises CheckpointError if there is none.

        `to`: "trusted" is the newest snapshot known to be good, and an older one each time that did not help; "first" is the
        state that this process started with; "disk" the newest checkpoint. Weights, moments, schedule, scaler, EMA, random
        state and the guards' baselines are restored. The data goes on from where it is, after `skip_windows` more steps' worth
        of it. Attempts, incidents and budgets are not rewound.
        """
        step = self._keeper.rollback(to, skip_windows)
        if self.last_good is not None:
            self.last_good.forget()
        return step

    def guard(self, name: str) -> Any:
        """The guard of that name; one that is not there yet is made with its defaults and put to work."""
        found = next((guard for guard in self.guards if guard.name == name), None)
        if found is None:
            found = REGISTRY[name]()
            self.guards.append(found)
            if (remove := found.attach(self.model)) is not None:
                self._at_end.callback(remove)
        return found

    # ---- moving parts ------------------------------------------------------------------------------------------

    def scheduled_lrs(self) -> tuple[float, ...]:
        return tuple([float(group.get("lr", 0.0)) for group in self.optimizer.param_groups])

    def scaled_lr(self, scale: float) -> AbstractContextManager[None]:
        """Outside the scheduler, which would overwrite (or compound) a change it finds in the groups."""
        return _AS_SCHEDULED if scale == 1.0 else self._with_scaled_lr(scale)

    @contextmanager
    def _with_scaled_lr(self, scale: float) -> Iterator[None]:
        groups = [group for group in self.optimizer.param_groups if "lr" in group]
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
            try:
                self.scheduler.step()
            except Exception as error:  # the weights have moved: this step is committed, and no further one begins
                self._schedule_error = error

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
