"""What a run adds to the parts of a trainer, from its first step to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checkpoint.policy import CheckpointPolicy
from ..config.schema import Config
from ..data.stream import BatchStream
from ..distributed.machine import deterministic_algorithms
from ..recovery import Ladder
from ..recovery.recovery import Recovery
from ..step.deferred import Deferral
from ..step.joint import JointExchange
from ..step.step import Step
from ..telemetry.watch import watching
from .evaluation import Evaluation
from .run import Run


@dataclass(frozen=True)
class Session:
    run: Run
    checkpoints: CheckpointPolicy
    recovery: Recovery
    deferral: Deferral


class Progress:
    """What a resume needs in addition to the parts that a step moves: the data cursor and the records."""

    recovery: Recovery

    def __init__(self, run: Run, step: Step, stream: BatchStream, evaluation: Evaluation) -> None:
        self._run, self._step, self._stream, self._evaluation = run, step, stream, evaluation

    def state_dict(self) -> dict[str, Any]:
        exchange = self._step.exchange
        return {
            "data": self._stream.state_dict(),
            "eval_epoch": 0 if self._evaluation.stream is None else self._evaluation.stream.epoch,
            "evaluated_at": self._run.evaluated_at,
            "run": self._run.state_dict(),
            "ladder": self.recovery.ladder.state_dict(),
            "bench": self.recovery.state_dict(),
            "patches": self._step.patches.state_dict(),
            "ddp_has_order": isinstance(exchange, JointExchange) and exchange.has_gradient_order,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state["data"])
        if self._evaluation.stream is not None:
            self._evaluation.stream.epoch = state["eval_epoch"]
        self._run.evaluated_at = state["evaluated_at"]
        self._run.load_state_dict(state["run"])
        self.recovery.ladder.load_state_dict(state["ladder"])
        self.recovery.load_state_dict(state["bench"])
        self._step.patches.load_state_dict(state["patches"])
        if isinstance(self._step.exchange, JointExchange):
            self._step.exchange.resume_gradient_order(state.get("ddp_has_order", False))


@contextmanager
def open_session(
    config: Config,
    run: Run,
    step: Step,
    stream: BatchStream,
    evaluation: Evaluation,
    ladder: Ladder,
    auxiliary_modules: Sequence[nn.Module],
) -> Iterator[Session]:
    """Hooks of the guards installed, the run announced; everything is removed again at the end."""
    progress = Progress(run, step, stream, evaluation)
    checkpoints = CheckpointPolicy(config, step, stream, run, progress)
    recovery = progress.recovery = Recovery(config, ladder, step, checkpoints, stream, run)
    with ExitStack() as stack:
        stack.push(lambda kind, error, trace: checkpoints.close(error))
        stack.callback(stream.close)
        stack.callback(recovery.report_changes)
        if config.loop.deterministic:
            stack.enter_context(deterministic_algorithms())
        stack.enter_context(step.guards.attached(step.model))
        step.include(auxiliary_modules)
        step.clear_gradients()
        deferral = Deferral(step, config.loop.host_read_every)
        stack.push(lambda kind, error, trace: deferral.close(None if error is None else run.stepped))
        about = {
            "name": config.name,
            "parameters": sum(p.numel() for p in step.model.parameters() if p.requires_grad),
            "device": str(step.device),
            "precision": step.precision.name,
            "world_size": step.exchange.world_size,
            "guards": [guard.name for guard in step.guards],
            "run_dir": run.dir,
            "total_steps": total_steps(config, stream),
        }
        run.started(about, stream.caveats() if config.checkpoint.enabled else [])
        if run.dir is not None and (config.logging.tensorboard or config.logging.trackers):
            every = config.logging.histograms_every
            stack.enter_context(watching(step.model, step.optimizer, run.telemetry, lambda: step.next_index, every))
        yield Session(run, checkpoints, recovery, deferral)


def total_steps(config: Config, stream: BatchStream) -> int | None:
    """How many steps the run will take, if that is known; refused ones come on top."""
    loop = config.loop
    by_epochs = None
    if (num_batches := stream.num_batches()) is not None:
        epochs = loop.max_epochs or (1 if loop.max_steps is None else None)
        by_epochs = None if epochs is None else epochs * -(-num_batches // loop.grad_accum)
    return min((n for n in (loop.max_steps, by_epochs) if n is not None), default=None)
