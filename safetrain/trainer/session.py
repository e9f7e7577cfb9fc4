"""What a run adds to the parts of a trainer, from its first step to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ..checkpoint.policy import CheckpointPolicy
from ..config.schema import Config
from ..core.endings import error_text
from ..core.incident import STATE_AUDIT, Incident
from ..core.verdict import Action, Decision, Verdict, merge
from ..core.view import StepView
from ..data.stream import BatchStream
from ..distributed.activity import BATCH, STEP
from ..distributed.machine import deterministic_algorithms
from ..errors import CheckpointError, DeviceLost, Interrupted, TrainingStopped
from ..optim.forecast import doubt
from ..optim.modes import train_mode
from ..recovery import Ladder, RefusedStep
from ..recovery.recovery import Recovery, Saved
from ..step.deferred import Deferral
from ..step.joint import JointExchange
from ..step.step import Stage, Step
from ..telemetry.histograms import logging_histograms
from ..tensors.devices import still_works
from ..tensors.rng import RandomState
from ..tensors.sharded import is_sharded
from .evaluation import Evaluation
from .hangs import watching_for_hangs
from .hooks import TrainerHooks
from .notes import notes_about, said_of_untrained, untrained
from .rescue import rescuing
from .run import Run


class Progress:
    """What a resume needs in addition to the parts that a step moves: the data cursor and the records."""

    recovery: Recovery

    def __init__(self, run: Run, step: Step, stream: BatchStream, evaluation: Evaluation) -> None:
        self._run, self._step, self._stream, self._evaluation = run, step, stream, evaluation

    def state_dict(self) -> dict[str, Any]:
        exchange = self._step.exchange
        return {
            "data": self._stream.state_dict(),
            "eval_data": {name: stream.state_dict() for name, stream in self._evaluation.streams.items()},
            "eval_epoch": max((stream.epoch for stream in self._evaluation.streams.values()), default=0),
            "evaluated_at": self._run.evaluated_at,
            "run": self._run.state_dict(),
            "bench": self.recovery.state_dict(),
            **self.recovery.states_of(self._parts()),
            "ddp_has_order": isinstance(exchange, JointExchange) and exchange.has_gradient_order,
        }

    def _parts(self) -> dict[str, Saved]:
        return {"ladder": self.recovery.ladder, "patches": self._step.patches}

    def give_back(self, num_micro_batches: int) -> None:
        """These were handed out for a step that never was; a resume reads them again."""
        self._stream.num_consumed -= num_micro_batches

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state["data"])
        for name, stream in self._evaluation.streams.items():
            if name in state.get("eval_data", {}):
                stream.load_state_dict(state["eval_data"][name])
            stream.epoch = state["eval_epoch"]
        self._run.evaluated_at = state["evaluated_at"]
        self._run.load_state_dict(state["run"])
        _note_resume(self._run)
        self.recovery.load_state_dict(state["bench"])
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])
        if isinstance(self._step.exchange, JointExchange):
            self._step.exchange.resume_gradient_order(state.get("ddp_has_order", False))


Hook = Callable[..., object]
UNUSED = {TrainerHooks.on_commit, TrainerHooks.on_incident, TrainerHooks.on_evaluation, TrainerHooks.on_epoch_end}


class Listener(Protocol):
    """Who is told what became of a step."""

    def on_commit(self, view: StepView) -> None: ...

    def on_incident(self, incident: Incident) -> None: ...


@dataclass(frozen=True)
class Session:
    """What becomes of a step that was judged. The loop that makes the steps may be the trainer's, or one that `watch` guards."""

    run: Run
    step: Step
    checkpoints: CheckpointPolicy
    recovery: Recovery
    deferral: Deferral
    progress: Progress
    listener: Listener

    def committed(self, view: StepView, decision: Decision, window: Sequence[Any]) -> None:
        """Record a step that is in the weights now."""
        if view.scaler_overflow:  # fp16: the scaler's own way of skipping a step
            return self.run.stepped(view, decision, "overflow")
        self.recovery.repairs.committed(window, view)
        self.run.stepped(view, decision, "commit")
        if self.step.schedule.is_stepped_elsewhere:
            self.run.say_once(
                f"something else steps {type(self.step.schedule.scheduler).__name__} too, so its rates go by faster than meant; "
                "leave scheduler.step() to the trainer",
                is_warning=True,
            )
        self.call(self.listener.on_commit, view)

    def evaluate_if_due(
        self,
        evaluation: Evaluation,
        hook: Hook,
        settle: Callable[[], object],
        save: Callable[[], object],
        **moment: bool,
    ) -> None:
        """Evaluate, and end the run if `loop.patience` is at its end. `settle` is called before, `save` if the evaluation raises."""
        run, result, step = self.run, self.run.result, self.step
        if not evaluation.streams:
            return
        if evaluation.is_due(result.steps + step.num_pending, run.evaluated_at, **moment):
            settle()  # some of the pending steps may turn out to have been refused
        if not evaluation.is_due(result.steps, run.evaluated_at, **moment):
            return
        try:
            with run.phase("evaluation", "evaluating"):
                metrics, is_best = evaluation.run(result)
        except Exception:
            if step.exchange.world_size == 1 or not is_sharded(step.model):
                save()  # what was learned is not lost with a mistake in the evaluation
            raise
        run.evaluated(metrics, is_best)
        if evaluation.unlogged:
            run.note_unlogged(evaluation.unlogged, "evaluation_step")
        step.schedule.step_with_metric(metrics[evaluation.monitor])
        self.call(hook, dict(result.evaluations[-1]))
        run.stop_reason = run.stop_reason or evaluation.why_stop(result.evaluations)

    def epoch_ended(self, hook: Hook, epoch: int) -> None:
        self.call(hook, epoch)
        if names := untrained(self.step.model, self.step.optimizer):
            self.run.say_once(said_of_untrained(names))

    def call(self, hook: Hook, *arguments: Any) -> None:
        """Call a hook of the user's. A model that it leaves in eval mode is put back: the rest of the run would train like that."""
        if getattr(hook, "__func__", None) in UNUSED:
            return
        transaction, model = self.step.transaction, self.step.model
        modes = transaction.modes() if model.training else None
        hook(*arguments)
        if modes is not None and not model.training:
            transaction.restore_modes(modes)
            name = getattr(hook, "__name__", type(hook).__name__)
            self.run.say_once(f"{name} left the model in eval mode; it was put back into train mode", is_warning=True)

    def save_after(self, error: Exception, settle: Callable[[], object]) -> None:
        """Save what was learned before an exception, so that a resume goes on with the step that it ended. `settle`: called before."""
        step, run = self.step, self.run
        if isinstance(error, (TrainingStopped, Interrupted, CheckpointError)) or step.exchange.world_size > 1:
            return
        if run.result.steps == 0 or step.stage is Stage.MOVING or not still_works(step.device):
            return
        try:
            if step.stage is Stage.ATTEMPT:
                step.undo(step.precision.host_loss_scale())
                step.transaction.random_state.restore()
                self.progress.give_back(step.window_length)
            settle()
            if self.checkpoints.save(required=True) is not None or run.dir is None or not self.checkpoints.saves:
                return
        except Exception as failure:
            run.warn(f"what was learned could not be saved after the error: {failure}")
            return
        hint = f"{run.result.steps} steps are saved in {run.result.run_dir}: repair this, and go on with resume"
        run.telemetry.noted(hint)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"safetrain: {hint}.")

    def refused(self, view: StepView, decision: Decision, window: Sequence[Any]) -> Action:
        """Recover from a step that was attempted and undone."""
        self.step.stage = Stage.MOVING
        case = self.recovery.resolve(view, decision, window, self.step.transaction.random_state)
        self.step.stage = Stage.BETWEEN
        return self.conclude(case)

    def refused_by_error(self, view: StepView, window: Sequence[Any], random_state: RandomState) -> Action:
        """The same if forward or backward raised."""
        step = self.step
        step.precision.keep_scale(view.loss_scale)
        step.transaction.begin(window)
        step.transaction.random_state = random_state
        return self.refused(view, step.judge(view), window)

    def bad_state(self, verdict: Verdict, epoch: int = 0) -> Action:
        """Between two steps the state was found to be wrong: go back, or stop."""
        self.step.transaction.begin()
        view = self.run.view_between_steps(epoch)
        return self.conclude(self.recovery.resolve_bad_state(view, merge([(STATE_AUDIT, verdict)])))

    def conclude(self, case: RefusedStep) -> Action:
        """Record the outcome of a refused step and tell the listener. Raises TrainingStopped on a stop."""
        if case.applied is not None:
            self.committed(*case.applied)
        if case.resolution is None:
            return Action.COMMIT
        self.run.close_incident(case)
        self.call(self.listener.on_incident, case.incident)
        if case.resolution.action is Action.STOP:
            raise TrainingStopped(case.incident, self.run.result) from case.view.error
        return case.resolution.action


@contextmanager
def open_session(
    config: Config,
    run: Run,
    step: Step,
    stream: BatchStream,
    evaluation: Evaluation,
    ladder: Ladder,
    auxiliary_modules: Sequence[nn.Module],
    listener: Listener,
) -> Iterator[Session]:
    """Hooks of the guards installed, the run announced; everything is removed again at the end."""
    progress = Progress(run, step, stream, evaluation)
    checkpoints = CheckpointPolicy(config, step, stream, run, progress)
    recovery = progress.recovery = Recovery(config, ladder, step, checkpoints, stream, run)
    if stream.source.unreadable is not None:
        stream.source.unreadable.found = recovery.leave_out_unreadable
    with ExitStack() as stack:
        stack.push(lambda kind, error, trace: _name_cause(run, step, error))
        stack.push(lambda kind, error, trace: checkpoints.close(error))
        stack.callback(stream.close)
        run.telemetry.activity = activity = step.exchange.watchdog.activity
        stream.watched_by(activity, STEP)
        for each in evaluation.streams.values():
            each.watched_by(activity, BATCH)
        stack.enter_context(watching_for_hangs(run, step.exchange, config.loop))
        stack.callback(recovery.report_changes)
        if config.loop.deterministic:
            stack.enter_context(deterministic_algorithms())
        stack.enter_context(step.guards.attached(step.model))
        train_mode(step.optimizer)
        step.include(auxiliary_modules)
        step.history.total_steps = total_steps(config, stream)
        step.clear_gradients()
        deferral = Deferral(step, config.loop.host_read_every)
        stack.push(
            lambda kind, error, trace: deferral.close(
                None if error is None or isinstance(error, DeviceLost) else run.stepped
            )
        )
        about = {
            "name": config.name,
            "parameters": sum(p.numel() for p in step.model.parameters() if p.requires_grad),
            "device": str(step.device),
            "precision": step.precision.name,
            "world_size": step.exchange.world_size,
            "guards": [guard.name for guard in step.guards],
            "run_dir": run.result.run_dir,
            "total_steps": step.history.total_steps,
        }
        caveats = stream.caveats() if config.checkpoint.enabled else []
        if run.resumed is None:
            _note_resume(run)
        evaluated = [each.source for each in evaluation.streams.values()]
        scheduled = step.schedule.scheduler is not None
        odd = notes_about(
            step.model, step.optimizer, stream.source, evaluated, auxiliary_modules, config.data, scheduled
        )
        run.started(about, [*caveats, *odd, *_about_schedule(config, step, stream, run)])
        if run.dir is not None and (every := config.logging.histograms_every) is not None:
            model, optimizer = step.model, step.optimizer
            stack.enter_context(logging_histograms(model, optimizer, run.telemetry, lambda: step.next_index, every))
        stack.enter_context(rescuing(step, checkpoints))
        yield Session(run, step, checkpoints, recovery, deferral, progress, listener)


def _about_schedule(config: Config, step: Step, stream: BatchStream, run: Run) -> list[str]:
    if run.resumed is not None or step.schedule.scheduler is None or not step.schedule.is_ours:
        return []
    found = doubt(step.schedule, total_steps(config, stream), total_epochs(config, stream))
    if found is None:
        return []
    entry = {"step": step.next_index, "label": "schedule_ended", "text": found.reason, "advice": found.fix, "names": []}
    run.result.warnings.append(entry)
    return [f"{found.reason}. To fix: {found.fix}."]


def total_epochs(config: Config, stream: BatchStream) -> int | None:
    """How many epochs the run will begin, if that is known."""
    loop, num_batches = config.loop, stream.num_batches()
    if loop.max_steps is None:
        return loop.max_epochs or 1
    by_steps = -(-loop.max_steps // -(-num_batches // loop.grad_accum)) if num_batches else None
    return min((n for n in (loop.max_epochs, by_steps) if n is not None), default=None)


def _note_resume(run: Run) -> None:
    if run.resumption is not None:
        run.resumption.note(run.result, run.step)
        run.telemetry.noted(run.resumption.describe())


def _name_cause(run: Run, step: Step, error: BaseException | None) -> None:
    """While the other ranks can still be asked."""
    if error is not None and not isinstance(error, (TrainingStopped, Interrupted)):
        run.result.error = error_text(step.exchange.explained(error))


def total_steps(config: Config, stream: BatchStream) -> int | None:
    """How many steps the run will take, if that is known; refused ones come on top."""
    loop = config.loop
    by_epochs = None
    if (num_batches := stream.num_batches()) is not None:
        epochs = loop.max_epochs or (1 if loop.max_steps is None else None)
        by_epochs = None if epochs is None else epochs * -(-num_batches // loop.grad_accum)
    return min((n for n in (loop.max_steps, by_epochs) if n is not None), default=None)
