"""The weights to evaluate and export: averaged ones, and those of optimizers with `train()` and `eval()`
(schedule-free).

Such an optimizer keeps the parameters at the point that gradients are taken at; its `eval()` moves them to the average that is meant
for use, and `train()` moves them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from .ema import Ema
from .optimizers import OptimizerGroup


def with_modes(optimizer: Optimizer) -> list[Any]:
    """Those that have both methods: the optimizer itself, or parts of a group."""
    parts = optimizer.optimizers.values() if isinstance(optimizer, OptimizerGroup) else [optimizer]
    return [part for part in parts if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None))]


def train_mode(optimizer: Optimizer) -> None:
    """The parameters are those that gradients are taken at."""
    for part in with_modes(optimizer):
        part.train()


@contextmanager
def weights_to_use(optimizer: Optimizer, ema: Ema | None = None) -> Iterator[None]:
    """Inside, the model has the weights that are meant for use; afterwards its own again, bit for bit."""
    with _eval_mode(optimizer), nullcontext() if ema is None else ema.swapped_in():
        yield


@contextmanager
def _eval_mode(optimizer: Optimizer) -> Iterator[None]:
    parts = with_modes(optimizer)
    parameters = [p for part in parts for group in part.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part in parts:
            part.train()
        with torch.no_grad():  # going there and back rounds
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
