"""Batches of any nesting: tuples, lists, dicts, dataclasses, and objects with `.to`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """The same nest with `fn` applied to every tensor and every object that has `.to`; all else is kept as it is.

    Containers are new ones, made by copying: no `__init__` or `__post_init__` of theirs runs.
    """
    if _is_leaf(batch):
        return fn(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, fn) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(item, fn) for item in batch)
    if isinstance(batch, dict):
        items = {key: map_tensors(item, fn) for key, item in batch.items()}
        if type(batch) is dict:
            return items
        rebuilt = copy.copy(batch)  # of its own type, with what else it holds: the factory of a defaultdict, say
        rebuilt.update(items)
        return rebuilt
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(
                    moved, field.name, map_tensors(getattr(batch, field.name), fn)
                )  # also if it is frozen
        return moved
    return batch


def _is_leaf(item: Any) -> bool:
    """A tensor, or an object that knows how to move itself (and not a named tuple with a field called `to`)."""
    if isinstance(item, Tensor):
        return True
    return (
        callable(getattr(item, "to", None)) and not isinstance(item, type) and "to" not in getattr(item, "_fields", ())
    )


def is_flat(batch: Any) -> bool:
    """A plain tuple or list of tensors, as most batches are: what follows need not look for more."""
    return type(batch) in (tuple, list) and bool(batch) and all(type(item) is Tensor for item in batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Every tensor of the nest, and every object that has `.to`."""
    if _is_leaf(batch):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from leaves(item)
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from leaves(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from leaves(getattr(batch, field.name, None))


def tensors_in(batch: Any) -> Iterable[Tensor]:
    """Every tensor of the nest, also those that an object with `.to` holds as its items or attributes."""
    return batch if is_flat(batch) else _tensors_in(batch)


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            held = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
            yield from (value for value in held.values() if isinstance(value, Tensor))


def same_nest(batch: Any) -> Any:
    """New containers around the same tensors: what is taken out of them or put in is not seen by others."""
    if is_flat(batch):
        return batch if type(batch) is tuple else list(batch)
    return map_tensors(batch, lambda item: copy.copy(item) if isinstance(item, Mapping) else item)


def copied(batch: Any) -> Any:
    """A copy that shares no tensor."""
    return map_tensors(batch, lambda item: item.detach().clone() if isinstance(item, Tensor) else copy.deepcopy(item))


def to_device(batch: Any, device: torch.device) -> Any:
    if is_flat(batch):
        return type(batch)([item if item.device == device else item.to(device) for item in batch])
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
