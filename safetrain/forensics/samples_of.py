"""How many samples a batch of any nesting holds, and the same batch with only some of them.

A batch is a nest of tensors, or an object with a row of samples of its own: a TensorDict, the `Batch` of a graph library, or
anything else that is indexed by a list of samples or taken apart and put together again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensors.nest import NESTED, own_samples, rebuilt, walk


def batch_size(batch: Any) -> int:
    """Length of the first tensor or array that has one; 1 when none has. A list of tensors of different lengths has one per
    sample, if something else in the batch has the length of the list."""
    for _, leaf in walk(batch):
        if (count := own_samples(leaf)) is not None:
            return count
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
    return (leaf for _, leaf in walk(batch) if isinstance(leaf, (Tensor, np.ndarray)))


def select(batch: Any, keep: list[int], size: int) -> Any:
    """The batch with only these samples: every tensor and list that has one entry per sample is cut down."""

    def change(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item[torch.tensor(keep, device=item.device)] if item.dim() and item.shape[0] == size else item
        if isinstance(item, np.ndarray):
            return item[keep] if item.ndim and item.shape[0] == size else item
        if isinstance(item, (list, tuple)) and not hasattr(item, "_fields") and len(item) == size:
            return type(item)(item[i] for i in keep) if _is_per_sample(item, size) else NESTED
        if own_samples(item) == size:
            return _taken_apart(item, keep)
        if isinstance(item, Mapping) and getattr(item, "batch_size", None) and not isinstance(item, dict):
            return item[torch.tensor(keep)] if item.batch_size[0] == size else item  # type: ignore[attr-defined]
        if isinstance(item, Mapping) and not isinstance(item, dict):
            return type(item)({key: rebuilt(value, change) for key, value in item.items()})  # type: ignore[call-arg]
        return NESTED

    return rebuilt(batch, change)


def _taken_apart(item: Any, keep: list[int]) -> Any:
    """A graph library's batch gives single graphs, and is put together again from them."""
    join = getattr(item, "from_data_list", None)
    return item[torch.tensor(keep)] if join is None else join([item[i] for i in keep])


def samples_of_rows(batch: Any, rows: list[int], num_rows: int) -> list[int]:
    """The samples that rows of a result belong to which has one row per node: graphs say which graph each of their nodes is of."""
    for _, leaf in walk(batch):
        owners = getattr(leaf, "batch", None) if own_samples(leaf) is not None else None
        if isinstance(owners, Tensor) and owners.dim() == 1 and len(owners) == num_rows:
            return sorted({int(owners[row]) for row in rows})
    return []


def _is_per_sample(items: Any, size: int) -> bool:
    """One entry per sample, not as many fields as there happen to be samples."""
    if isinstance(items, list) and _is_ragged(items):
        return True
    return not any(isinstance(item, (Tensor, np.ndarray)) and item.ndim and item.shape[0] == size for item in items)
