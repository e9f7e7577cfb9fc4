"""Looks through a whole data set for batches that make a step bad, without training and without disturbing the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..core.incident import Incident
from ..core.progress import note
from ..tensors.rng import undisturbed_rng
from .investigation import investigate
from .replay import Replayer
from .step import Effort, Step


def find_bad_batches(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    data: Iterable[Any] | Dataset[Any],
    precision: str = "fp32",
    limit: int | None = None,
    effort: Effort | None = None,
    total: int | None = None,
) -> list[tuple[int, Incident]]:
    """Position and incident of every batch whose loss or gradients are non-finite with the model as it is, at most `limit` of them.

    A map-style data set is gone through sample by sample. A healthy batch costs one plain step, and nothing is updated.
    `total` is the number of batches, to show how far it has come, for data without a length.

    >>> data = torch.rand(6, 8, 4)
    >>> data[4, 1, 0] = float("nan")
    >>> [(index, found.samples) for index, found in find_bad_batches(torch.nn.Linear(4, 1), lambda m, x: m(x).mean(), data)]
    [(4, [1])]
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=1)
    found: list[tuple[int, Incident]] = []
    total = len(data) if total is None and isinstance(data, Sized) else total
    with undisturbed_rng():
        for index, batch in enumerate(data):
            note(f"{len(found)} bad so far", index, total)
            if is_healthy(Step(model, loss_fn, [batch], precision=precision)):
                continue
            incident = investigate(model, loss_fn, batch, precision=precision, effort=effort)
            if incident is None:
                continue  # it did not happen again
            incident.step = index
            found.append((index, incident))
            if limit is not None and len(found) >= limit:
                break
    return found


def is_healthy(step: Step) -> bool:
    with Replayer(step) as replayer:
        result = replayer.plain()
        buffers = all(bool(torch.isfinite(b).all()) for b in replayer.model.buffers() if b.is_floating_point())
    return result.finite and buffers
