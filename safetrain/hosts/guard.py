"""`watch`: the guard of the user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import __version__
from .._private import host
from ..checkpoint import open_store
from ..checkpoint.plain import from_loadable, to_loadable
from ..checkpoint.state import TrainState
from ..core.incident import Incident
from ..core.loss import LossFn, adapt_loss
from ..core.result import FitResult
from ..core.rundir import free_run_dir
from ..core.view import StepView
from ..data.stream import BatchStream
from ..distributed.comm import by_first
from ..errors import CheckpointError, TrainingStopped, UsageError
from ..forensics.replay import unwrapped_model
from ..forensics.sandbox import modules_behind
from ..guards import Guard
from ..guards.guard_set import GuardSet
from ..optim.schedule import Schedule
from ..recovery import Ladder
from ..step.exchange import Exchange
from ..trainer import build, checks
from ..trainer.evaluation import Evaluation
from ..trainer.run import Run
from ..trainer.session import Session, open_session
from . import settings
from .hosted_step import HostedExchange, HostedPrecision, HostedStep, HostMachine
from .open_guards import close_those_of, open_guards
from .recording import Recorder
from .turn import Turn
from .whole import whole_step

WITHOUT_THE_LOSS = {"skip", "rollback", "disk", "restart"}
"""Rungs that need not compute the loss of the refused step."""


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    scheduler: Any = None,
    loss_fn: LossFn | None = None,
    precision: str = "fp32",
    config: Any = None,
    run_dir: str | Path | None = None,
    guards: Iterable[Guard] | None = None,
) -> LoopGuard:
    """Guard a loop that you keep: every update is judged before it is applied.

    Call it last, when model, optimizer and scheduler are complete (compiled, wrapped in DDP, prepared by accelerate). Several
    optimizers that step together are given as a list. `loss_fn(model, batch)` computes the loss as the loop does, for replays
    and repairs; `precision` says what the loop's autocast does: `fp32`, `bf16` or `fp16`. `config` and `guards` are as for
    `SafeTrainer`, without what the loop decides itself.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> guard = watch(model, optimizer, config=QUIET)
    >>> for x in torch.randn(20, 8, 3):
    ...     with guard.step(x):
    ...         loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> guard.close()
    >>> guard.result.steps, guard.result.healthy
    (20, True)
    """
    return LoopGuard(
        model,
        optimizer,
        scheduler=scheduler,
        loss_fn=loss_fn,
        precision=precision,
        config=config,
        run_dir=run_dir,
        guards=guards,
    )


class LoopGuard:
    """What `watch` returns. `with guard.step(batch):` goes around forward, backward and `optimizer.step()`.

    >>> model = torch.nn.Linear(3, 1)
    >>> guard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), config=QUIET)
    >>> losses = [guard.run(x, lambda model, x: model(x).square().mean()) for x in torch.randn(5, 8, 3)]
    >>> isinstance(guard, LoopGuard), losses == guard.result.losses
    (True, True)
    >>> guard.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        scheduler: Any = None,
        loss_fn: LossFn | None = None,
        precision: str = "fp32",
        config: Any = None,
        run_dir: str | Path | None = None,
        guards: Iterable[Guard] | None = None,
    ) -> None:
        host.LISTENING.require(to_fix="use SafeTrainer, or a torch version that safetrain was tested with.")
        settings.check_module(model)
        self.config = settings.hosted_config(config, precision)
        self.given, self.model = model, unwrapped_model(model)
        checks.check_trainable(self.model)
        self.optimizers, one = settings.as_one(optimizer, self.model)
        replaces = close_those_of(self.optimizers)
        self.on_incident_do: list[Callable[[Incident], None]] = []
        """Called with each incident, before the run stops if it does."""
        self.on_end_do: list[Callable[[], None]] = []
        """Called once when the guard is closed, or its run was stopped."""
        device = next(self.model.parameters()).device
        machine = HostMachine(device, self.config.loop.rank_timeout_seconds)
        self.recorder = Recorder(model) if loss_fn is None else None
        self.loss_fn = adapt_loss(loss_fn) if loss_fn is not None else self.recorder.replay  # type: ignore[union-attr]
        self.called = self.model if isinstance(model, DistributedDataParallel) else model
        arithmetic = HostedPrecision(precision, device, self.model, self.optimizers)
        members = GuardSet(build.build_guards(self.config.guards, guards or ()))
        self._step = HostedStep(
            self.model,
            self._training_step,
            one,
            guards=members,
            precision=arithmetic,
            schedule=Schedule(one, settings.one_scheduler(scheduler)),
            exchange=Exchange() if machine.link is None else HostedExchange(machine),
            called=self.called,
        )
        self._step.schedule.is_ours = False
        if self.recorder is not None:
            self._step.blind_spot = self.recorder.blind_spot
        self._stream = BatchStream(settings.LoopData(), device)
        self.ladder = Ladder(self.config.recovery)
        self._rungs = self.ladder.rungs
        self._stack = ExitStack()
        self._session = self._opened(run_dir, machine.rank)
        self._turn = Turn(self, self._step, arithmetic, self._session)
        self._has_begun = False
        self.closed = False
        self.checks_loss = loss_fn is not None
        """The first step compares `loss_fn` with the loss of the loop."""
        open_guards.add(self)
        if replaces:
            self._session.run.warn("the guard that this optimizer had was still open, and was closed")

    def _opened(self, run_dir: str | Path | None, rank: int) -> Session:
        step, config = self._step, self.config
        asked = run_dir
        if isinstance(run_dir, (str, Path)):
            named = run_dir
            asked = by_first(lambda: free_run_dir(named))  # a loop may be started again
        run = step.exchange.run = Run(config, asked, rank, False, step.history)
        evaluation = Evaluation({}, config.loop, step, self.loss_fn, None)
        extra = list(modules_behind(self.loss_fn)) if self.recorder is None else []
        self._stack.enter_context(run.recorded(notes_signals=False))
        self._stack.enter_context(step.exchange.session(step))
        parts = (config, run, step, self._stream, evaluation, self.ladder, extra, self)
        return self._stack.enter_context(open_session(*parts))

    def choose_rungs(self) -> None:
        """Before a refused step is recovered from. If its loss cannot be computed again, it is only ever skipped, rolled back or
        stopped at."""
        can_repair = self.recorder is None or self.recorder.is_whole
        self.ladder.rungs = [rung for rung in self._rungs if can_repair or rung.name in WITHOUT_THE_LOSS]

    def _compute_with(self, loss_fn: LossFn) -> None:
        """From now on the loss can be computed by us."""
        if self.recorder is not None:
            self.recorder.remove()
            self.recorder, self._step.blind_spot = None, str
            self.choose_rungs()
        self.loss_fn = adapt_loss(loss_fn)
        self._step.include(modules_behind(self.loss_fn))

    def _training_step(self, model: nn.Module, batch: Any) -> Any:
        return self.loss_fn(model, batch)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def step(self, *batches: Any) -> Turn:
        """A context manager around forward, backward and `optimizer.step()` on this batch.

        With gradient accumulation, either one block for each micro-batch, of which the last one has the `optimizer.step()`, or one
        block for all of them: `guard.step(first, second, …)`.
        """
        self._check_open()
        return self._turn.on(batches)

    def begin(self, *batches: Any) -> None:
        """As entering `with guard.step(batch):`, for a loop that is not to be indented. A block that was not ended (by a `continue`, say)
        ends here."""
        self._check_open()
        self._turn.leave()
        self._turn.enter(batches)

    def end(self) -> None:
        """As leaving it. What the code in between raises is raised; with a `with` it may be a refused step."""
        self._turn.leave()

    def is_refused(self, error: BaseException) -> bool:
        """Whether what the code after `begin` raised is a refused step, which is then dealt with: the rest of the step has no effect."""
        return self._turn.raised(error)

    def run(self, batch: Any, loss_fn: LossFn | None = None) -> float:
        """Forward, backward, judge and commit one step on this batch, as SafeTrainer does; returns its loss.

        The optimizer is stepped, the schedule that was given to `watch` too, and gradients are cleared. Everything can be
        repaired here.
        """
        self._check_open()
        if loss_fn is not None:
            self._compute_with(loss_fn)
        elif self.recorder is not None:
            raise UsageError(
                "guard.run() has no loss to compute.\nTo fix: guard.run(batch, loss_fn), or watch(…, loss_fn=…)."
            )
        return whole_step(self, self._turn, self._step, self._session, batch)

    def note_loss(self, loss: torch.Tensor) -> None:
        """Tell the guard the loss of this step, if the loop makes its gradients without calling backward."""
        self._turn.note_loss(loss)

    @property
    def committed(self) -> bool:
        """The last step was applied, maybe after a repair. For what the loop itself moves with the weights, like an average."""
        return self._turn.was_committed

    def keep(self, name: str, part: Any) -> None:
        """Something with `state_dict` and `load_state_dict` that the loop moves with the weights (an average of them, say): a
        refused step leaves it where it was, and a rollback takes it back too."""
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(
                f"guard.keep({name!r}, …): {type(part).__name__} has no state_dict and load_state_dict.\n"
                "To fix: give an object that has them, such as torch.optim.swa_utils.AveragedModel."
            )
        self._step.stateful[name] = part

    # ---- results and state -------------------------------------------------------------------------------------

    @property
    def result(self) -> FitResult:
        """What has happened so far: the fields of SafeTrainer's result."""
        run = self._session.run
        if not self.closed:
            run.result.losses = list(run.losses)
            run.result.seconds = run.seconds
        return run.result

    @property
    def run_dir(self) -> Path | None:
        return self._session.run.result.run_dir

    def guard(self, name: str) -> Any:
        """The guard of that name; one that is not there yet is added with its defaults."""
        return self._step.guards.named(name)

    def state_dict(self) -> dict[str, Any]:
        """For the loop's own checkpoint, beside model, optimizer and scheduler: what the guards have learned, the record, and the
        budgets. Loads with `weights_only=True`."""
        step = self._step
        guards = {guard.name: guard.state_dict() for guard in step.guards}
        return {  # copies: what is saved later must not change with the run
            "guards": to_loadable(guards, "guards"),
            "progress": to_loadable(self._session.progress.state_dict(), "progress"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave. Load model, optimizer and scheduler first."""
        if not {"guards", "progress"} <= state.keys():
            raise CheckpointError("this is not the state of a guard.\nTo fix: give what guard.state_dict() returned.")
        for name, learned in from_loadable(state["guards"]).items():
            if any(guard.name == name for guard in self._step.guards):
                self._step.guards.named(name).load_state_dict(learned)
        self._session.progress.load_state_dict(from_loadable(state["progress"]))

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint of everything (model, optimizer, scheduler, random state, guards) into a directory; returns its path.

        It is complete and checksummed, or it does not exist. A state that is not finite is refused.
        """
        self._turn.check_between_steps("guard.save()")
        run = self._session.run
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        about = {
            "step": run.step,
            "num_committed": run.result.steps,
            "epoch": 0,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "version": __version__,
        }
        state = TrainState.gather(self._step, run.result.steps, self._session.progress)
        store = open_store(Path(path), self.config.loop.rank_timeout_seconds)
        try:
            return store.write(state, about)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written to: {error}.\nTo fix: free some space there.") from error

    def load(self, path: str | Path) -> int:
        """Go on from the newest checkpoint in a directory that `save` wrote to; returns the number of attempted steps before it."""
        self._turn.check_between_steps("guard.load()")
        loaded = open_store(Path(path), self.config.loop.rank_timeout_seconds).load_newest()
        if loaded is None:
            raise CheckpointError(
                f"there is no checkpoint in {path}.\nTo fix: give the directory that save() wrote to."
            )
        loaded.state.restore_progress(self._session.progress)
        loaded.state.restore_training(self._step)
        self._step.clear_gradients()
        return loaded.manifest.step

    # ---- ends --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the summary and let go of the optimizer. The loop may go on, unwatched."""
        self.ended(None)

    def ended(self, error: BaseException | None) -> None:
        """As `close`, after an error of the loop if there was one."""
        if self.closed:
            return
        result = self.result
        self.closed = True
        open_guards.discard(self)
        self._turn.let_go()
        for tell in self.on_end_do:
            tell()
        if self.recorder is not None:
            self.recorder.remove()
        result.losses = list(self._session.run.losses)
        try:
            if error is None:
                self._stack.close()
            else:
                self._stack.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is not error:
                raise

    def ended_by(self, error: BaseException) -> None:
        """A step has raised: a stop ends the run, other errors may be caught by the loop."""
        if isinstance(error, TrainingStopped):
            self.ended(error)

    def __enter__(self) -> LoopGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended(error)

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError(
                "this guard is closed: its run has ended.\nTo fix: make a new one with watch() to train on."
            )

    def prepare(self) -> None:
        """Before the first step: the state to go back to."""
        if not self._has_begun:
            self._has_begun = True
            if (problem := self._session.checkpoints.begin(None)) is not None:
                self._session.bad_state(problem)

    # ---- what the session tells --------------------------------------------------------------------------------

    def on_commit(self, view: StepView) -> None: ...

    def on_incident(self, incident: Incident) -> None:
        for tell in self.on_incident_do:
            tell(incident)
