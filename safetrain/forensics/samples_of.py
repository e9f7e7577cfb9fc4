"""A batch as a row of samples, whatever its nesting: how many there are, and the same batch with only some of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def batch_size(batch: Any) -> int:
    """Length of the first tensor or array that has one; 1 when none has. Of tensors of different lengths in a list there are as
    many as samples, if something else has that length."""
    lengths = [(id(item), item.shape[0]) for item in _payload(batch) if item.ndim]
    for items in _ragged(batch):
        own = set(map(id, items))
        if any(length == len(items) for item, length in lengths if item not in own):
            return len(items)
    return lengths[0][1] if lengths else 1


def _ragged(batch: Any) -> Iterator[list[Any]]:
    """The lists of tensors inside a batch whose first dimensions differ; the batch itself is a list of fields."""
    fields = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for field in fields:
        if isinstance(field, list) and _is_ragged(field):
            yield field


def _is_ragged(items: list[Any]) -> bool:
    if not all(isinstance(item, (Tensor, np.ndarray)) and item.ndim for item in items):
        return False
    return len({item.shape[0] for item in items}) > 1


def has_arrays(batch: Any) -> bool:
    """Does it hold NumPy arrays, which become tensors only inside the step?"""
    return any(isinstance(item, np.ndarray) for item in _payload(batch))


def _payload(batch: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    if isinstance(batch, (Tensor, np.ndarray)):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _payload(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _payload(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _payload(getattr(batch, field.name))


def select(batch: Any, keep: list[int], size: int) -> Any:
    """The batch with only these samples: every tensor and list that has one entry per sample is cut down."""
    if isinstance(batch, Tensor):
        return batch[torch.tensor(keep, device=batch.device)] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, np.ndarray):
        return batch[keep] if batch.ndim and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        items = {key: select(value, keep, size) for key, value in batch.items()}
        if not isinstance(batch, dict):
            return type(batch)(items)  # type: ignore[call-arg]
        result = copy.copy(batch)  # keeps the type and what else it holds
        result.update(items)
        return result
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(select(value, keep, size) for value in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == size and _is_per_sample(batch, size):
            return type(batch)(batch[i] for i in keep)
        return type(batch)(select(value, keep, size) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {f.name: select(getattr(batch, f.name), keep, size) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **changes)
    return batch


def _is_per_sample(items: Any, size: int) -> bool:
    """One entry per sample, not one tensor per field that happens to be as many."""
    if isinstance(items, list) and _is_ragged(items):
        return True
    return not any(isinstance(item, (Tensor, np.ndarray)) and item.ndim and item.shape[0] == size for item in items)
