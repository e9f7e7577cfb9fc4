"""One pass over the evaluation data that leaves no trace in the training state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._private.ddp import num_collectives
from ..config.schema import LoopConfig
from ..core import progress
from ..core.loss import split_metrics, unlogged_values
from ..core.result import FitResult
from ..core.verdict import Finding
from ..data.belongings import Belongings
from ..data.sources import StatefulSource
from ..data.stream import BatchStream
from ..distributed.comm import Link
from ..errors import DataError, LossError, UsageError
from ..guards.modes import watched_evaluation
from ..optim.modes import weights_to_use
from ..step.step import Step
from ..tensors.devices import wide
from ..tensors.nest import num_samples
from ..tensors.rng import undisturbed_rng
from ..tensors.sharded import is_sharded
from .findings import note_warnings

RESERVED = {"step", "event", "best", "time"}
"""What the record of an evaluation holds besides its metrics."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside, each in its own former mode afterwards (a frozen BatchNorm stays frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Evaluation:
    """Evaluates the model every `loop.eval_every` committed steps, or at the end of each epoch."""

    def __init__(
        self,
        streams: Mapping[str, BatchStream],
        loop: LoopConfig,
        step: Step,
        evaluation_step: Callable[[nn.Module, Any], Any],
        link: Link | None,
    ) -> None:
        self.streams, self._loop, self._step, self._link = dict(streams), loop, step, link
        self.evaluation_step = evaluation_step
        self.monitor = loop.monitor
        self.unlogged: list[str] | None = None
        """Names of what the first evaluation step returned that is not one number; None before it."""
        self._looks = any(guard.name == "sanity" for guard in step.guards)
        """The first batch is still to be looked at: does the model compute as in training?"""
        self._findings: list[Finding] = []

    def is_due(
        self,
        num_steps: int,
        evaluated_at: int,
        epoch_ended: bool = False,
        run_ended: bool = False,
        started: bool = False,
    ) -> bool:
        """`evaluated_at`: committed steps at the last evaluation."""
        if self.streams and started:
            return num_steps == 0 and self._loop.eval_at_start
        if not self.streams or num_steps == evaluated_at:
            return False
        every = self._loop.eval_every
        return run_ended or (epoch_ended if every is None else num_steps // every > evaluated_at // every)

    def run(self, result: FitResult) -> tuple[dict[str, float], bool]:
        """The metrics, and whether they are the best so far. Leaves no trace in the training state."""
        step = self._step
        metrics: dict[str, float] = {}
        with weights_to_use(step.optimizer, step.ema):
            step.transaction.begin()
            try:
                step.exchange.begin()  # every rank evaluates the same model
                for name, stream in self.streams.items():
                    found = evaluate(step.model, self._evaluate_batch, stream, self._link)
                    metrics |= {f"{name}/{key}" if name else key: value for key, value in found.items()}
            finally:
                step.transaction.restore()
        for text in note_warnings(result, self._findings, step.index):
            logging.getLogger("safetrain").warning("%s", text)
        self._findings = []
        self._name_monitored(metrics)
        is_best = is_better(metrics, result.best, self._loop.monitor, self._loop.monitor_mode)
        return metrics, is_best

    def try_out(self) -> list[str]:
        """Evaluate one batch, so that a mistake raises now; returns its metrics. Nothing of it is kept, and the data begins where it was.
        Data that would be used up by that is left alone."""
        metrics: dict[str, float] = {}
        for name, stream in self.streams.items():
            if stream.source.one_shot or isinstance(stream.source, StatefulSource):
                return []
            metrics |= {f"{name}/{key}" if name else key: 0.0 for key in self._try_one(stream)}
        if metrics:
            self._name_monitored(metrics)
            is_better(metrics, None, self._loop.monitor, self._loop.monitor_mode)
        return list(metrics)

    def _name_monitored(self, metrics: dict[str, float]) -> None:
        """Of several sets the first one's metric is also known without its name, if that is the one to monitor."""
        monitor, first = self._loop.monitor, next(iter(self.streams), "")
        if first and monitor not in metrics and f"{first}/{monitor}" in metrics:
            metrics[monitor] = metrics[f"{first}/{monitor}"]

    def _try_one(self, stream: BatchStream) -> Iterable[str]:
        step, source, belongings = self._step, stream.source.state_dict(), _belongings(self.evaluation_step)
        step.transaction.begin()
        try:
            with undisturbed_rng(), eval_mode(step.model), torch.no_grad():
                window = stream.take(1)
                metrics = split_metrics(self._evaluate_batch(window[0]), "evaluation_step") if window else {}
        finally:
            step.transaction.restore()
            belongings.restore(everything=True)
            stream.restart()
            stream.source.load_state_dict(source)
        _check_names(metrics)
        return metrics

    def why_stop(self, evaluations: Sequence[Mapping[str, float]]) -> str | None:
        """Why the run should end, if `loop.patience` is at its end."""
        loop = self._loop
        if loop.patience is None:
            return None
        best, since = None, 0
        for record in evaluations:
            better = is_better(record, best, loop.monitor, loop.monitor_mode, loop.min_delta)
            best, since = (record, 0) if better else (best, since + 1)
        if since < loop.patience:
            return None
        known = f"the best was {best[loop.monitor]:.5g} at step {best['step']:.0f}" if best else "it was never a number"
        return f"{loop.monitor} has not improved in {since} evaluations; {known} (loop.patience)"

    def _evaluate_batch(self, batch: Any) -> Any:
        # Not through the distributed wrapper: its collectives would have to match on all ranks.
        model = self._step.called if self._step.exchange.world_size == 1 else self._step.model
        checked = self._step.bounds.checked([batch])
        with self._step.precision.autocast(), checked, self._looked_at() as self._findings:
            output = self.evaluation_step(model, batch)
        if self.unlogged is None:
            self.unlogged = unlogged_values(output)
        return output

    def _looked_at(self) -> AbstractContextManager[list[Finding]]:
        looks, self._looks = self._looks and self._step.called is self._step.model, False
        return watched_evaluation(self._step.model) if looks else nullcontext(self._findings)


def evaluate(
    model: nn.Module, step: Callable[[Any], Any], batches: BatchStream, link: Link | None = None
) -> dict[str, float]:
    """Mean of each metric over the batches that gave it, weighted by their samples. NaN in any batch makes the mean NaN.

    Several ranks split the batches among them, and all get the same means.
    """
    # A rank that raises leaves the others in the forward pass of a sharded model, where nothing can be agreed on any more.
    with nullcontext() if link is None or is_sharded(model) else link.together("in the evaluation"):
        totals, weights = _totals(model, step, batches, link)
    if link is not None:
        totals, weights = _summed(link.gather((totals, weights)))
    batches.next_epoch()
    if not totals:
        raise DataError("the evaluation data has no samples.\nTo fix: check its path and length, or leave it out.")
    _check_names(totals)
    return {name: total / weights[name] for name, total in totals.items()}


def _belongings(evaluation_step: Callable[[nn.Module, Any], Any]) -> Belongings:
    """What an evaluation step may count in: attributes of a subclass, variables around a function."""
    owner = getattr(evaluation_step, "__self__", None)
    parts = getattr(owner, "__dict__", {}).values()
    return Belongings(
        [evaluation_step], [p for p in parts if isinstance(p, (nn.Module, Optimizer)) or _is_ours(type(p))]
    )


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _check_names(metrics: Iterable[str]) -> None:
    if taken := sorted(RESERVED & set(metrics)):
        raise LossError(
            f"evaluation_step returned a metric called {taken[0]!r}, which the record of a run uses itself.\nTo fix: rename it."
        )


def _totals(
    model: nn.Module, step: Callable[[Any], Any], batches: BatchStream, link: Link | None
) -> tuple[dict[str, float], dict[str, int]]:
    rank, world_size = (link.rank, link.world_size) if link else (0, 1)
    totals: dict[str, Tensor | float] = {}
    weights: dict[str, int] = {}
    num_batches = batches.num_batches()
    with undisturbed_rng(), eval_mode(model), torch.no_grad():
        talks = is_sharded(model)  # does an evaluation step exchange something with the other processes?
        for index, (first, own, size) in enumerate(_groups(batches, rank, world_size)):
            progress.note("batch", index * world_size + size, num_batches)
            if size < world_size and link is not None and not link.any(talks or index == 0) and own is None:
                break
            # Without a batch of its own it takes part in what the others exchange, and its result does not count.
            batch, before = first if own is None else own, num_collectives() if link is not None else 0
            metrics = split_metrics(step(batch), "evaluation_step")
            talks = talks or (link is not None and num_collectives() != before)
            if own is None:
                break
            count = num_samples(batch)
            for name, value in metrics.items():
                value = wide(value.detach().reshape(())) if isinstance(value, Tensor) else float(value)
                totals[name] = totals.get(name, 0.0) + value * count
                weights[name] = weights.get(name, 0) + count
    return {name: float(total) for name, total in totals.items()}, weights


def _groups(batches: BatchStream, rank: int, world_size: int) -> Iterator[tuple[Any, Any, int]]:
    """Of each group of as many batches as there are processes: its first, that of this rank (None if there is none), and its size."""
    first = own = None
    size = 0
    while window := batches.take(1):
        if num_samples(window[0]) == 0:
            continue
        first = window[0] if size == 0 else first
        own = window[0] if size == rank else own
        size += 1
        if size == world_size:
            yield first, own, size
            first, own, size = None, None, 0
    if size:
        yield first, own, size


def _summed(parts: Iterable[tuple[Mapping[str, float], Mapping[str, int]]]) -> tuple[dict[str, float], dict[str, int]]:
    totals: dict[str, float] = {}
    weights: dict[str, int] = {}
    for part, counts in parts:
        for name, total in part.items():
            totals[name] = totals.get(name, 0.0) + total
            weights[name] = weights.get(name, 0) + counts[name]
    return totals, weights


def is_better(
    metrics: Mapping[str, float], best: Mapping[str, float] | None, monitor: str, mode: str, by: float = 0.0
) -> bool:
    """Whether these metrics beat the best so far, `by` more than this. NaN is worse than any number, also than none at all."""
    if monitor not in metrics:
        raise UsageError(
            f"loop.monitor is {monitor!r}, which evaluation_step did not return (it returned {', '.join(metrics)}).\n"
            "To fix: set loop.monitor to one of these."
        )
    value = metrics[monitor]
    if math.isnan(value):
        return False
    return best is None or (value < best[monitor] - by if mode == "min" else value > best[monitor] + by)
