"""Batches of any nesting: tuples, lists, dicts, dataclasses, and objects with `.to`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """The same nest with `fn` applied to every tensor and every object that has `.to`; all else is kept as it is."""
    if isinstance(batch, Tensor) or (hasattr(batch, "to") and not isinstance(batch, type)):
        return fn(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, fn) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(item, fn) for item in batch)
    if isinstance(batch, dict):
        items = {key: map_tensors(item, fn) for key, item in batch.items()}
        return items if type(batch) is dict else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {f.name: map_tensors(getattr(batch, f.name), fn) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **changes)
    return batch


def leaves(batch: Any) -> Iterator[Any]:
    """Every tensor of the nest, and every object that has `.to`."""
    if isinstance(batch, Tensor) or (hasattr(batch, "to") and not isinstance(batch, type)):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from leaves(item)
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from leaves(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from leaves(getattr(batch, field.name))


def to_device(batch: Any, device: torch.device) -> Any:
    return map_tensors(batch, lambda item: item.to(device))


def num_samples(batch: Any) -> int:
    """Length of the first dimension of the first tensor that has one; 1 when none has."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return 1


def describe(batch: Any) -> str:
    """The types in a batch, for error messages."""
    if isinstance(batch, (list, tuple)) and batch:
        inner = ", ".join(dict.fromkeys(type(item).__name__ for item in batch))
        return f"{type(batch).__name__} of {inner}"
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(f'{k}: {type(v).__name__}' for k, v in batch.items())}"
    return type(batch).__name__
