"""Converts values to types that `torch.load(weights_only=True)` accepts, and back: loading can never run code."""

from __future__ import annotations

import dataclasses
import typing
from collections import deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import UsageError

_TAG = "__safetrain__"
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
Rebuilt = TypeVar("Rebuilt")


def to_loadable(value: Any, where: str) -> Any:
    """A copy of the value; deques and arrays are tagged so that `from_loadable` can restore them.

    `where` names the owner of the value in the error that is raised for a type that cannot be loaded safely.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is list and _PLAIN.issuperset(map(type, value)):  # the history of a guard: long, and plain numbers
        return value.copy()
    if type(value) is tuple and _PLAIN.issuperset(map(type, value)):  # there is one for each tensor of an optimizer
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, deque):
        items = [to_loadable(item, where) for item in value]
        return {_TAG: "deque", "maxlen": value.maxlen, "items": items}
    if isinstance(value, Mapping):
        return {
            key if type(key) in _PLAIN else to_loadable(key, where): item
            if type(item) in _PLAIN
            else to_loadable(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if type(value) in (list, tuple, set):
        return type(value)(to_loadable(item, where) for item in value)
    if isinstance(value, tuple):  # a namedtuple
        return tuple(to_loadable(item, where) for item in value)
    if isinstance(value, (bool, int, float, str)):  # enums and other subclasses of plain types
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise UsageError(
        f"{where} holds a {type(value).__name__}, which cannot be saved in a form that is safe to load.\n"
        "To fix: let its state_dict() return numbers, strings, tensors, lists and dicts only, or set checkpoint.enabled=false."
    )


def from_loadable(value: Any) -> Any:
    """The inverse of `to_loadable`."""
    if isinstance(value, dict):
        kind = value.get(_TAG)
        if kind == "array":
            return value["data"].numpy().view(np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        if kind == "deque":
            return deque((from_loadable(item) for item in value["items"]), value["maxlen"])
        return {key: from_loadable(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(from_loadable(item) for item in value)
    return value


def rebuild(cls: type[Rebuilt], fields: Mapping[str, Any]) -> Rebuilt:
    """The inverse of `dataclasses.asdict`; fields that the class no longer has are dropped."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    return cls(**{name: _rebuild_value(hints[name], value) for name, value in fields.items() if name in known})


def _rebuild_value(hint: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        for member in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(member) and isinstance(member, type):
                return rebuild(member, value)
    if isinstance(value, list) and typing.get_origin(hint) is list:
        return [_rebuild_value(typing.get_args(hint)[0], item) for item in value]
    return value
