"""Batches of any nesting: tuples, lists, dicts, dataclasses, and objects with `.to`. Nothing else walks through them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .devices import is_host, pinned
from .originals import note_moved


class Key(NamedTuple):
    """One step down into a nest: a key or an index, or the name of an attribute."""

    name: Any
    is_attribute: bool
    position: int | None = None
    """Of a field of a named tuple."""


Path = tuple[Key, ...]


def dotted(path: Path) -> str:
    """`inputs.mask` in nested dicts and dataclasses, `0` and `1` in a pair; empty for a tensor that is the whole batch. Fields of
    a named tuple have their position, as globs in a config count on."""
    return ".".join(str(key.name if key.position is None else key.position) for key in path)


def in_code(path: Path, name: str) -> str:
    """As a program spells it: `batch[0]`, `batch['x']`, `batch.x`."""
    return name + "".join(f".{key.name}" if key.is_attribute else f"[{key.name!r}]" for key in path)


# ---- looking into it -----------------------------------------------------------------------------------------------


def walk(nest: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in a nest that is not a container itself, with its path: tensors, arrays, numbers, objects."""
    items = _items(nest)
    if items is None:
        yield path, nest
    else:
        for key, item in items:
            yield from walk(item, (*path, key))


def _items(nest: Any) -> Iterable[tuple[Key, Any]] | None:
    """What a container holds; None for what is no container. A named tuple that has `.to` (PackedSequence) has fields that are
    not a row of samples each, so it is none."""
    if isinstance(nest, Tensor):
        return None
    if isinstance(nest, Mapping):
        return [(Key(name, False), item) for name, item in nest.items()]
    if isinstance(nest, (list, tuple)):
        if names := getattr(nest, "_fields", None):
            return None if _is_leaf(nest) else [(Key(names[i], True, i), item) for i, item in enumerate(nest)]
        return [(Key(index, False), item) for index, item in enumerate(nest)]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return _attributes(nest, [field.name for field in dataclasses.fields(nest)])
    return None


def _attributes(owner: Any, names: Iterable[str]) -> list[tuple[Key, Any]]:
    return [(Key(name, True), getattr(owner, name)) for name in names if hasattr(owner, name)]


def _is_leaf(item: Any) -> bool:
    """A tensor, or an object that knows how to move itself (and not a named tuple with a field called `to`)."""
    if isinstance(item, Tensor):
        return True
    return (
        callable(getattr(item, "to", None)) and not isinstance(item, type) and "to" not in getattr(item, "_fields", ())
    )


def is_flat(batch: Any) -> bool:
    """A plain tuple or list of tensors, as most batches are: nothing in it is to be searched for."""
    if type(batch) not in (tuple, list):
        return False
    for item in batch:  # asked for several times a step, and faster than all() with a generator
        if type(item) is not Tensor:
            return False
    return bool(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """Every tensor of the nest, and every object that has `.to`."""
    return (leaf for _, leaf in walk(batch) if _is_leaf(leaf))


def tensors_in(batch: Any) -> Iterable[Tensor]:
    """Every tensor of the nest, also those that an object in it holds."""
    return batch if is_flat(batch) else (tensor for _, tensor in _tensors(batch))


def num_bytes(nest: Any) -> int:
    """Memory of all its tensors; a sparse one counts as if it were dense."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(nest))


def named_tensors(batch: Any, spelled: Callable[[Path], str] = dotted) -> Iterator[tuple[str, Tensor]]:
    """The same tensors with their paths: `dotted`, or in another spelling."""
    return ((spelled(path), tensor) for path, tensor in _tensors(batch))


def _tensors(batch: Any) -> Iterator[tuple[Path, Tensor]]:
    for path, leaf in walk(batch):
        if isinstance(leaf, Tensor):
            yield path, leaf
            continue
        for key, held in _held(leaf):  # by an object; objects inside that one may refer back to it, and are not entered
            yield from ((below, item) for below, item in walk(held, (*path, key)) if isinstance(item, Tensor))


def _held(item: Any) -> Iterable[tuple[Key, Any]]:
    if isinstance(item, (type, nn.Module)):
        return ()
    if callable(keys := getattr(item, "keys", None)):  # the attributes of a graph are in a store of its own
        return _attributes(item, [name for name in keys() if isinstance(name, str)])
    return () if callable(item) else _attributes(item, getattr(item, "_fields", getattr(item, "__dict__", ())))


def num_samples(batch: Any) -> int:
    """Length of the first dimension of the first tensor that has one, or of the first object that is a row of samples itself; 1
    when there is neither."""
    for _, leaf in walk(batch):
        if isinstance(leaf, Tensor):
            if leaf.dim() > 0:
                return leaf.shape[0]
        elif (count := own_samples(leaf)) is not None:
            return count
    return 1


def own_samples(item: Any) -> int | None:
    """How many samples an object holds that is a row of them itself, as the `Batch` of a graph library; None for others."""
    if isinstance(item, Tensor) or hasattr(item, "_fields") or not _is_leaf(item) or isinstance(item, nn.Module):
        return None
    if isinstance(count := getattr(item, "num_graphs", None), int):
        return count
    return len(item) if hasattr(item, "__len__") and hasattr(item, "__getitem__") else None


# ---- the same nest with other tensors ------------------------------------------------------------------------------


def map_tensors(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """The same nest with `fn` applied to every tensor and every object that has `.to`; all else is kept as it is."""
    return rebuilt(batch, lambda item: fn(item) if _is_leaf(item) else NESTED)


NESTED = object()
"""What the function given to `rebuilt` answers for an item that is to be looked into."""


def rebuilt(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest with every item replaced by `change(item)`, from the outside in: a container only if that is not NESTED.

    Containers are new ones, made by copying: no `__init__` or `__post_init__` of theirs runs.
    """
    if (changed := change(nest)) is not NESTED:
        return changed
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(rebuilt(item, change) for item in nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(rebuilt(item, change) for item in nest)
    if isinstance(nest, dict):
        items = {key: rebuilt(item, change) for key, item in nest.items()}
        if type(nest) is dict:
            return items
        other = copy.copy(nest)  # of its own type, with what else it holds: the factory of a defaultdict, say
        other.update(items)
        return other
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        moved: Any = copy.copy(nest)
        for key, item in _attributes(nest, [field.name for field in dataclasses.fields(nest)]):
            object.__setattr__(moved, key.name, rebuilt(item, change))  # also if it is frozen
        return moved
    return nest


def same_nest(batch: Any) -> Any:
    """New containers around the same tensors: what is taken out of them or put in is not seen by others."""
    if is_flat(batch):
        return batch if type(batch) is tuple else list(batch)
    return map_tensors(batch, lambda item: copy.copy(item) if isinstance(item, Mapping) else item)


def copied(batch: Any) -> Any:
    """A copy that shares no tensor."""
    return map_tensors(batch, lambda item: item.detach().clone() if isinstance(item, Tensor) else copy.deepcopy(item))


def to_device(batch: Any, device: torch.device) -> Any:
    """From the host to another device by way of pinned memory, so that the host waits for no copy."""
    if is_flat(batch):
        return type(batch)([item if item.device == device else _moved(item, device) for item in batch])
    return map_tensors(batch, lambda item: _moved(item, device))


def _moved(item: Any, device: torch.device) -> Any:
    if not isinstance(item, Tensor):
        if is_host(device):
            return item.to(device)
        try:
            return item.to(device, non_blocking=True)
        except TypeError:  # it takes a device and nothing else
            return item.to(device)
    if item.device == device:
        return item
    crosses = is_host(item.device) and item.layout is torch.strided and not is_host(device)
    if not crosses:
        return item.to(device)
    moved = (source := pinned(item)).to(device, non_blocking=True)
    note_moved(moved, source)
    return moved


def describe(batch: Any) -> str:
    """The types in a batch, for error messages."""
    if isinstance(batch, (list, tuple)) and batch:
        inner = ", ".join(dict.fromkeys(type(item).__name__ for item in batch))
        return f"{type(batch).__name__} of {inner}"
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} with {', '.join(f'{k}: {type(v).__name__}' for k, v in batch.items())}"
    return type(batch).__name__
