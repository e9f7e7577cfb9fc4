"""One pass over the evaluation data that leaves no trace in the training state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .assembly import split_loss
from .batch import num_samples
from .data import BatchStream
from .errors import DataError, LossError, UsageError
from .rng import undisturbed_rng

RESERVED = {"step", "event", "best", "time"}
"""What the record of an evaluation holds beside its metrics."""


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


def evaluate(model: nn.Module, step: Callable[[Any], Any], batches: BatchStream) -> dict[str, float]:
    """Mean of each metric over the batches that gave it, weighted by their samples. NaN in any batch makes the mean NaN."""
    totals: dict[str, Tensor | float] = {}
    weights: dict[str, int] = {}
    with undisturbed_rng(), eval_mode(model), torch.no_grad():
        while window := batches.take(1):
            count = num_samples(window[0])
            if count == 0:
                continue
            loss, metrics = split_loss(step(window[0]), "evaluation_step")
            for name, value in {"loss": loss, **metrics}.items():
                value = value.detach().reshape(()).double() if isinstance(value, Tensor) else float(value)
                totals[name] = totals.get(name, 0.0) + value * count
                weights[name] = weights.get(name, 0) + count
    batches.next_epoch()
    if not totals:
        raise DataError("the evaluation data has no samples.\nTo fix: check its path and length, or leave it out.")
    if taken := sorted(RESERVED & totals.keys()):
        raise LossError(
            f"evaluation_step returned a metric called {taken[0]!r}, which the record of a run uses itself.\nTo fix: rename it."
        )
    return {name: float(total) / weights[name] for name, total in totals.items()}


def is_better(metrics: Mapping[str, float], best: Mapping[str, float] | None, monitor: str, mode: str) -> bool:
    """Whether these metrics beat the best so far. NaN is worse than any number, also than none at all."""
    if monitor not in metrics:
        raise UsageError(
            f"loop.monitor is {monitor!r}, which evaluation_step did not return (it returned {', '.join(metrics)}).\n"
            "To fix: set loop.monitor to one of these."
        )
    value = metrics[monitor]
    if math.isnan(value):
        return False
    return best is None or (value < best[monitor] if mode == "min" else value > best[monitor])
