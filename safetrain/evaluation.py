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
from .errors import UsageError
from .rng import undisturbed_rng


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
    """Mean of each metric over the data, weighted by the number of samples. NaN in any batch makes the mean NaN."""
    totals: dict[str, Tensor | float] = {}
    weight = 0
    with undisturbed_rng(), eval_mode(model), torch.no_grad():
        while window := batches.take(1):
            loss, metrics = split_loss(step(window[0]), "evaluation_step")
            count = num_samples(window[0])
            weight += count
            for name, value in {"loss": loss, **metrics}.items():
                value = value.detach().reshape(()).double() if isinstance(value, Tensor) else float(value)
                totals[name] = totals.get(name, 0.0) + value * count
    batches.next_epoch()
    return {name: float(total) / weight for name, total in totals.items()}


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
