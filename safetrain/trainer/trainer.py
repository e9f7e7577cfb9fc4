"""The training loop: every step is a transaction that commits completely or leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from ..core.loss import LossFn
from ..core.protocols import PARTS, REPLACEABLE
from ..core.result import FitResult
from ..core.verdict import Action, Verdict
from ..errors import Interrupted, UsageError
from ..forensics.sandbox import modules_behind
from ..guards import Guard
from ..guards.guard_set import GuardSet
from ..optim.ema import Ema
from ..precision.mixed import Precision
from ..recovery import Ladder
from ..step.deferred import UNDONE, Late
from ..step.memory import attempt
from ..step.step import Outcome, Stage, Step
from ..telemetry.images import pixels_of
from ..tensors.devices import place
from . import build, checks
from .evaluation import Evaluation
from .hooks import TrainerHooks
from .notes import carried, said_of_carried
from .run import Run
from .session import Session, open_session

if TYPE_CHECKING:
    from ..preflight import CheckReport


class SafeTrainer(TrainerHooks):
    """Trains a model so that no bad step is ever applied.

    Use it as it is, from a config, or subclass it and define any of its hooks. `fit` is this loop:

        for each window of micro-batches:
            begin ─ attempt ─ judge ─┬─ commit   weights, moments, schedule, buffers move; guards learn; on_commit
                                     └─ undo ─ recover: repair and commit, skip, go back, or stop; on_incident
            evaluate, save and take snapshots when due

    >>> data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = SafeTrainer(model, loss_fn=torch.nn.MSELoss(), optimizer=optimizer, train_data=data, config=QUIET)
    >>> trainer.fit().final_loss < 0.5
    True
    """

    _session: Session

    def __init__(
        self,
        model: nn.Module | None = None,
        *unnamed: Any,
        loss_fn: LossFn | None = None,
        optimizer: Optimizer | None = None,
        train_data: Any = None,
        eval_data: Any = None,
        scheduler: Any = None,
        scheduler_every: str | None = None,
        config: Any = None,
        guards: Iterable[Guard] | None = None,
        run_dir: str | Path | bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        """Parts that are not given come from the `build_*` hooks, which by default follow the config.

        `guards` are added to those of the config; one with the same name takes its place. The run directory is made by
        `fit`, below `runs/` unless `run_dir` says where; with `run_dir=False` nothing is written. `eval_data` may be a dict of
        evaluation data by name.
        """
        checks.check_keywords(unnamed, unknown, SafeTrainer.__init__.__kwdefaults__ or ())
        self.config, self._run_dir = build.load_for(config, run_dir), run_dir
        loop = self.config.loop
        self.machine = build.open_machine(self.config)
        self.model = self.build_model() if model is None else model
        checks.check_trainable(self.model)
        checks.check_model_of_ranks(self.model)
        self.guards = GuardSet(build.build_guards(self.config.active_guards, guards or ()))
        self.precision = Precision(loop.precision, self.machine.device, self.model)
        called = build.prepare_model(self.model, self.machine, loop, optimizer, self.guards)
        self.loss_fn = build.choose_loss(loss_fn, self.config)
        self.optimizer = self.build_optimizer(self.model) if optimizer is None else optimizer
        checks.check_optimizer(self.model, self.optimizer)
        checks.check_optimizer_of_ranks(self.optimizer)
        self.scheduler = self.build_scheduler(self.optimizer) if scheduler is None else scheduler
        given = self.build_data() if train_data is None else train_data
        self.stream, evaluated = build.open_data(given, eval_data, self.config, self.machine, train_data is None)
        checks.check_scheduler(self.scheduler, self.optimizer, bool(evaluated))
        self.ema = None if loop.ema is None else Ema(self.model, loop.ema)
        self.ladder = Ladder(self.config.recovery)
        self.stepper = Step(
            self.model,
            self.training_step,
            self.optimizer,
            guards=self.guards,
            precision=self.precision,
            schedule=build.open_schedule(self.optimizer, self.scheduler, scheduler_every, self.config),
            ema=self.ema,
            exchange=build.open_exchange(self.machine),
            called=called,
        )
        self.evaluation = Evaluation(evaluated, loop, self.stepper, self.evaluation_step, self.machine.link)
        self._run: Run | None = None
        self._made = {name: id(getattr(self, name)) for name in PARTS if name not in REPLACEABLE}
        for module in self.auxiliary_modules():
            place(module, self.machine.device)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def fit(self, resume: bool | str = False) -> FitResult:
        """Train until `loop.max_steps` or `loop.max_epochs`. Raises TrainingStopped when a guard stops the run.

        With `resume=True` go on exactly where the run in `run_dir` was: build the trainer as for the first call, from the same
        model, data and config. "auto": resume if `run_dir` holds a run, else start one. "force": also with a config that
        changes the training itself; the optimizer's settings are then still those that were saved.
        """
        with self._started(resume) as run:
            if self.config.loop.eval_check:
                self.evaluation.try_out()
            self._evaluate_if_due(started=True)
            while not self._finished():
                if window := self._next_window():
                    self.run_step(window)
                    self._evaluate_if_due()
                elif self.stepper.exchange.signal is None:
                    self._end_epoch()
                if (problem := self._session.checkpoints.after_step(self._settle)) is not None:
                    self._recover_state(problem)
                if self._ends_early():
                    return run.result
            self._evaluate_if_due(run_ended=True)
            self._settle()
            if (problem := self._session.checkpoints.finish()) is not None:
                self._recover_state(problem)
        return run.result

    def run_step(self, window: Sequence[Any]) -> None:
        """One optimizer step over a window of micro-batches, as a transaction."""
        step = self.stepper
        step.begin(window)
        try:
            measurement = attempt(step, window, self.config.loop.on_out_of_memory, self.run.warn)
            window = measurement.window or window
        except Exception as error:
            if not self._refuse_error(error, window):
                raise
            return None
        if step.unlogged:
            self.run.note_unlogged(step.unlogged)
        if self._session.deferral.is_on and self._session.deferral.apply_if_decidable(window, measurement):
            return self._session.deferral.settle_if_full(self._committed_late, self._refused_late, self.run.stepped)
        if step.num_pending and self._settle():  # the rollback has replaced the weights it was computed with
            step.clear_gradients()
            return self.run.stepped(step.view(measurement), UNDONE, "rollback")
        view = step.view(measurement)
        decision = step.judge(view)
        if decision.action is Action.COMMIT:
            if step.commit(measurement, view, decision) is not Outcome.RUINED:
                return self._session.committed(view, decision, window)
            decision = step.refusal_of_ruined(view)
        step.undo(view.loss_scale)
        self._session.refused(view, decision, window)

    def _refuse_error(self, error: Exception, window: Sequence[Any]) -> bool:
        """Forward or backward raised. If a guard knows why, that is a refused step; if none does, it is the user's error."""
        step, exchange = self.stepper, self.stepper.exchange
        if exchange.is_abandoned(error):
            step.transaction.restore()
            step.clear_gradients()
            self.stream.num_consumed -= len(window)  # is read again after a resume
            return True
        if not exchange.may_be_refused(error):
            return False
        random_state = step.transaction.random_state
        step.transaction.restore()
        step.clear_gradients()
        step.stage = Stage.BETWEEN
        went_back = self._settle()
        view = step.view_of_error(error, window)
        if not exchange.explains(step, view):
            self.stream.num_consumed -= len(window)
            random_state.restore()
            if exchange.failed_together:  # all ranks are still there, so what was learned is saved, before this window
                self._session.checkpoints.save()
            return False
        if went_back:
            self.run.stepped(view, UNDONE, "rollback")
            return True
        self._session.refused_by_error(view, window, random_state)
        return True

    def _recover_state(self, verdict: Verdict) -> None:
        """Between two steps the state was found to be wrong: go back, or stop."""
        if not self._settle():  # back before it already
            self._session.bad_state(verdict, self.stream.epoch)

    # ---- deferred steps: their numbers reach the host several at a time -----------------------------------------

    def _settle(self) -> bool:
        """Read the numbers of all deferred steps. True if one of them caused a rollback."""
        if not self.stepper.num_pending:
            return False
        return self._session.deferral.settle(self._committed_late, self._refused_late, self.run.stepped)

    def _committed_late(self, late: Late) -> None:
        self.stepper.learn(late.view, late.decision)
        self._session.committed(late.view, late.decision, late.pending.window)
        if (incident := self._session.recovery.open_too_late(late)) is not None:
            self.run.keep(incident)
            self.on_incident(incident)

    def _refused_late(self, late: Late) -> Action:
        return self._session.conclude(self._session.recovery.resolve_late(late))

    # ---- between steps -----------------------------------------------------------------------------------------

    @contextmanager
    def _started(self, resume: bool | str) -> Iterator[Run]:
        """The run's directory opened, the guards' hooks installed; everything is removed again at the end."""
        checks.check_constructed(self)
        if self._run is not None:
            raise UsageError("fit() was already called on this trainer.\nTo fix: make a new SafeTrainer for a new run.")
        checks.check_parts(self, self._made)
        self._carried = carried(self)
        step = self.stepper
        # These may have been set on this instance.
        self.loss_fn = build.choose_loss(self.loss_fn, self.config)
        step.training_step, self.evaluation.evaluation_step = self.training_step, self.evaluation_step
        step.schedule.scheduler, step.guards[:] = self.scheduler, self.guards
        self._run = step.exchange.run = run = Run(self.config, self._run_dir, self.machine.rank, resume, step.history)
        parts = (self.config, run, step, self.stream, self.evaluation, self.ladder, self.auxiliary_modules(), self)
        with step.exchange.session(step), run.recorded(), open_session(*parts) as self._session:
            if (problem := self._session.checkpoints.begin(run.resumed)) is not None:
                self._recover_state(problem)
            run.write_config()
            try:
                yield run
            except Exception as error:
                self._session.save_after(error, self._settle)
                raise

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Before `fit`: inside, hooks find a run that has just begun, of which nothing is written."""
        self._run = self.stepper.exchange.run = Run(self.config, None, self.machine.rank, is_written=False)
        try:
            yield
        finally:
            self._run = None

    def _finished(self) -> bool:
        loop, result = self.config.loop, self._session.run.result
        if self.stepper.exchange.is_stopping:
            return True
        if loop.max_steps is not None:
            if result.steps + self.stepper.num_pending >= loop.max_steps:
                self._settle()
            if result.steps >= loop.max_steps:
                return True
        max_epochs = loop.max_epochs if loop.max_epochs is not None or loop.max_steps is not None else 1
        return max_epochs is not None and self.stream.epoch >= max_epochs

    def _next_window(self) -> list[Any]:
        step, window = self.stepper, []
        try:
            window = self.stream.take(self.config.loop.grad_accum)
        except Exception as error:
            if self.run.signal is None:  # the signal may have killed the loader's workers too
                window = step.exchange.no_window(error)
        step.history.epoch = self.stream.epoch
        if window:
            step.exchange.warm_up(step, window)
        else:
            step.exchange.end_of_epoch(step)
        return window

    def _end_epoch(self) -> None:
        self._settle()
        if names := [name for name, ids in carried(self).items() if ids != self._carried.get(name)]:
            self.run.say_once(said_of_carried(names))
        self._session.epoch_ended(self.on_epoch_end, self.stream.epoch)
        self.stream.next_epoch()
        self.run.result.epochs += 1
        self.stepper.schedule.epoch_ended()
        self._evaluate_if_due(epoch_ended=True)

    def _evaluate_if_due(self, **moment: bool) -> None:
        self._session.evaluate_if_due(self.evaluation, self.on_evaluation, self._settle, self._save, **moment)

    def _ends_early(self) -> bool:
        """Save and end: the schedule failed, a signal came, or `loop.max_hours` are over."""
        step, result = self.stepper, self._session.run.result
        if (error := step.schedule.error) is not None and not self._finished():
            self._save()
            raise UsageError(step.schedule.failed_after(step.next_index - 1)) from error
        if (signal := step.exchange.signal) is not None:
            self._save()
            raise Interrupted(signal, result)
        if self.config.loop.max_hours is not None and step.exchange.out_of_time and not self._finished():
            self._save()
            result.status = "paused"
            return True
        return False

    def _save(self) -> None:
        """Write a checkpoint and wait until it is on disk. If the state is not sound, recover first."""
        self._settle()
        while (problem := self._session.checkpoints.save(required=True)) is not None:
            self._recover_state(problem)

    # ---- for users ---------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        if self._run is None:
            raise UsageError("there is no run yet.\nTo fix: call fit() first.")
        return self._run

    @property
    def has_run(self) -> bool:
        """`fit` was called."""
        return self._run is not None

    @property
    def step(self) -> int:
        """Index of the step being attempted."""
        self.run  # noqa: B018  raises if there is none
        return self.stepper.next_index

    def check(self, only: str | Iterable[str] | None = None, budget: float = 10.0) -> CheckReport:
        """Check data, model and first steps before `fit()`, without changing any of them; see `safetrain.check`."""
        from ..preflight import check

        checks.check_constructed(self)
        return check(self, only, budget)

    def stop(self, reason: str = "stop() was called") -> None:
        """End the run after this step as if it were its last one: it is evaluated and saved, and `result.stop_reason` says why."""
        self.run.stop_reason = self.run.stop_reason or reason

    def log_image(self, tag: str, image: Any) -> None:
        """Show an image in TensorBoard at this step: a tensor or array `[height, width]` or `[channels, height, width]`, floats from 0 to 1
        or uint8. Where nothing takes images (`logging.tensorboard` is off) that is said once."""
        pixels, is_finite = pixels_of(image)
        telemetry = self.run.telemetry
        if not telemetry.takes("image"):
            self.run.say_once("log_image: nothing takes images, as logging.tensorboard is off")
        if not is_finite:
            self.run.say_once(f"log_image: {tag} has values that are not finite; they are shown as 0")
        telemetry.image(tag, pixels, self.step)

    def rollback(self, to: str = "trusted", skip_windows: int = 0) -> int:
        """Go back to an earlier state; returns the step it is of. Raises CheckpointError if there is none.

        `to`: "trusted" is the newest snapshot known to be good, and an older one each time that did not help; "first" is the
        state that this process started with; "disk" the newest checkpoint. Weights, moments, schedule, scaler, EMA, random
        state and the guards' baselines are restored. The data goes on from where it is, after `skip_windows` more steps' worth
        of it. Attempts, incidents and budgets are not rewound.
        """
        self.run  # noqa: B018  raises if there is none
        self._settle()
        return self._session.recovery.repairs.go_back(to, skip_windows)[0]

    def guard(self, name: str) -> Any:
        """The guard of that name; one that the run does not have yet is added with its defaults."""
        return self.stepper.guards.named(name)

    def auxiliary_modules(self) -> list[nn.Module]:
        """Modules that a step uses and that are not part of the model: its loss, and attributes of a subclass."""
        own = [v for v in vars(self).values() if isinstance(v, nn.Module) and v is not self.stepper.called]
        return [*own, *modules_behind(self.training_step if self.loss_fn is None else self.loss_fn)]
