"""Checks of reproducibility: the same step run twice, and a run that is saved and resumed, give the same bits."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...checkpoint.state import TrainState
from ...core.incident import Incident
from ...core.numbers import amount, gibibytes, listed
from ...core.view import StepView
from ...data.sources import IterableSource, ListSource, MapSource, StatefulSource
from ...errors import Interrupted
from ...tensors.devices import wide
from ...tensors.nest import named_tensors
from ...trainer.trainer import SafeTrainer
from ..outcome import Outcome, Unavailable, failed, graded, passed, warned
from ..registry import preflight_check
from ..subject import Subject

TOLERANCE = 1e-4
"""A relative difference up to this may come from the order of additions on a GPU."""
MAX_STATE_BYTES = 500 * 2**20
NUM_STEPS = 4
"""Steps of the run that is interrupted in the middle."""


@preflight_check(
    looks_at="whether the same step gives the same bits again",
    fails="loss or gradients differ by more than 1e-4",
    warns="they differ by less, or the data is not the same when it is read again",
    fix="draw random numbers from torch, NumPy or Python; `loop.deterministic=true`",
)
def replay(subject: Subject) -> Outcome:
    """The first batch twice, from the same state: every bit of its loss and gradients must agree."""
    batch = subject.healthy[0].batch
    (loss, gradients), (loss_again, gradients_again) = _once(subject, batch), _once(subject, batch)
    differing = {
        name: _difference(gradient, gradients_again.get(name))
        for name, gradient in {"loss": loss, **gradients}.items()
        if not _same_bits(gradient, loss_again if name == "loss" else gradients_again.get(name))
    }
    if "loss" in differing:
        differing["loss"] = _difference(loss, loss_again)
    if not differing:
        same = passed(f"loss and {len(gradients)} gradients are the same bit for bit")
        return _other_data(subject) or same
    largest = max(differing.values())
    return graded(
        largest > TOLERANCE,
        f"the same step gives other numbers when it is run again: {listed(list(differing))} differ by up to {amount(largest)}",
        "draw random numbers from torch, numpy.random or random, not from the clock, os.urandom or a new generator in each step; "
        "for GPU kernels set loop.deterministic=true",
        differing=list(differing)[:64],
        largest=largest,
    )


def _other_data(subject: Subject) -> Outcome | None:
    first = subject.first[0]
    with subject.clean():
        again = next(iter(subject.sample.batches(in_order=True)))
    one, other = dict(named_tensors(first.batch)), dict(named_tensors(again.batch))
    differing = [path for path in one if not _same_bits(one[path], other.get(path))]
    if not differing:
        return None
    return warned(
        f"the first batch is different when it is read again: field {listed(differing)}",
        "seed the random numbers of the data set per sample (from its index and the epoch), so that a resume reads the same data",
        fields=differing,
    )


def _once(subject: Subject, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    with subject.clean():
        loss = subject.forward(batch)
        torch.autograd.backward(loss)
        gradients = {name: p.grad.detach() for name, p in subject.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


# ---- save and resume ---------------------------------------------------------------------------------------------------


@preflight_check(
    looks_at="whether four steps, saved and resumed halfway, give the same bits as uninterrupted ones",
    fails="a tensor differs",
    fix="`register_buffer` for what a module counts or caches; data that repeats its order",
)
def resume(subject: Subject) -> Outcome:
    """A few steps uninterrupted, and the same steps saved and resumed halfway: the weights must be bit-identical."""
    size = sum(t.nbytes for t in subject.model.state_dict().values() if isinstance(t, Tensor))
    if size > MAX_STATE_BYTES:
        raise Unavailable(f"the model has {gibibytes(size)}, too much to save twice in a check")
    subject.healthy  # noqa: B018  raises where no step can be made
    steps = 2 * NUM_STEPS * subject.trainer.config.loop.grad_accum
    if steps * subject.seconds_per_step > subject.budget.left:
        raise Unavailable(
            f"{steps} passes of {amount(subject.seconds_per_step)} s do not fit into the budget; raise --budget"
        )
    if subject.guards is None:
        raise Unavailable("the guards cannot be copied, so a second run next to the real one is not possible")
    with tempfile.TemporaryDirectory(prefix="safetrain-check-") as directory, _quiet():
        whole = _run(subject, Path(directory, "whole"), NUM_STEPS, False)
        _run(subject, Path(directory, "cut"), NUM_STEPS // 2, False)
        resumed = _run(subject, Path(directory, "cut"), NUM_STEPS, True)
    differing = [name for name, tensor in whole.items() if not _same_bits(tensor, resumed.get(name))]
    if not differing:
        return passed(
            f"{NUM_STEPS} steps and {NUM_STEPS // 2} + {NUM_STEPS // 2} after a resume give the same {len(whole)} tensors"
        )
    return failed(
        f"a resumed run goes on differently: {listed([name.partition('/')[2] for name in differing])} differ after {NUM_STEPS} steps",
        "let everything that a step depends on be saved: register_buffer (or get_extra_state) for counters and caches of a module, "
        "no private torch.Generator, and data that repeats its order or has state_dict and load_state_dict",
        differing=differing[:64],
    )


def _run(subject: Subject, directory: Path, num_steps: int, resumed: bool) -> dict[str, Tensor]:
    """Train as a new process would: from the start, with nothing but the run directory."""
    with subject.clean():
        try:
            trainer = _twin(subject, directory, num_steps)
            trainer.fit(resume=resumed)
        except Interrupted as error:
            raise KeyboardInterrupt from error
        except Exception as error:
            first_line = str(error).splitlines()[0] if str(error) else ""
            raise Unavailable(
                f"the run does not get through {num_steps} steps: {type(error).__name__}: {first_line}"
            ) from error
        state = TrainState.gather(trainer.stepper)
        return {name: tensor.clone() for name, tensor in state.tensors.items()}


def _twin(subject: Subject, directory: Path, num_steps: int) -> SafeTrainer:
    """A trainer with the same parts that writes to another directory and prints nothing."""
    trainer = subject.trainer
    config = copy.deepcopy(trainer.config)
    config.loop.max_steps, config.loop.max_epochs, config.loop.max_hours = num_steps, None, None
    config.loop.compile, config.data.num_workers = False, 0
    config.logging.console, config.logging.tensorboard = "off", False
    config.logging.trackers, config.logging.sinks = [], []
    config.forensics.enabled, config.recovery.heal, config.recovery.ladder = False, [], ["skip"]
    checkpoint = config.checkpoint
    checkpoint.enabled, checkpoint.async_, checkpoint.save_final, checkpoint.snapshot_every = True, False, False, None

    class Twin(type(trainer)):  # type: ignore[misc]
        """The user's class without its own constructor, whose arguments are not known; the attributes that it set are taken over."""

        def __init__(self, **parts: Any) -> None:
            self.__dict__ |= vars(trainer)
            for hook in ("on_commit", "on_incident"):  # one may have been set on the instance
                self.__dict__.pop(hook, None)
            SafeTrainer.__init__(self, **parts)

        def build_scheduler(self, optimizer: Optimizer) -> None:
            """ReduceLROnPlateau is left out: it is stepped after an evaluation, of which there is none."""

        def on_commit(self, view: StepView) -> None:
            """The user's may write files or send messages."""

        def on_incident(self, incident: Incident) -> None:
            """Likewise."""

    return Twin(
        model=trainer.model,
        loss_fn=trainer.loss_fn,
        optimizer=trainer.optimizer,
        train_data=_data_of(subject.sample.source()),
        scheduler=None if isinstance(trainer.scheduler, ReduceLROnPlateau) else trainer.scheduler,
        scheduler_every=trainer.stepper.schedule.every,
        config=config,
        guards=copy.deepcopy(subject.guards),
        run_dir=directory,
    )


def _data_of(source: Any) -> Any:
    if isinstance(source, ListSource):
        return [copy.deepcopy(batch) for batch in source.data[: 4 * NUM_STEPS]]
    assert isinstance(source, (MapSource, IterableSource, StatefulSource))
    return source.data


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("safetrain")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def _same_bits(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _difference(one: Tensor, other: Tensor | None) -> float:
    """Relative to the largest value; 1 where there is nothing to compare with."""
    if other is None or one.shape != other.shape:
        return 1.0
    largest = max(float(one.abs().max()), 1e-30)
    return float((wide(one) - wide(other)).abs().max()) / largest
