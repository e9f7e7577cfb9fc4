"""Converts values to types that `torch.load(weights_only=True)` accepts, and back: loading can never run code."""

from __future__ import annotations

import dataclasses
import types
import typing
import zipfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import UsageError

_TAG = "__safetrain__"
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
Rebuilt = TypeVar("Rebuilt")


MAX_VALUES = 5_000_000
MAX_DEPTH = 100
MAX_EXPANDED = 2**30
"""Bytes that tensors may have beyond what is in the file: they share storage, or repeat it by a stride of 0."""


def load_plain(path: Path) -> Any:
    """What `torch.save` wrote, without running code, and without more memory or time than its size promises.

    Raises ValueError for what is damaged, compressed, or made to be larger than it looks; and what `torch.load` raises.
    """
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            raise ValueError("it is not a file of torch.save, and was not run")
    try:
        with zipfile.ZipFile(path) as archive:
            members, size = archive.infolist(), path.stat().st_size
            packed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]
            if packed or len(members) > MAX_VALUES or sum(m.file_size for m in members) > size:
                raise ValueError("it is compressed, which it was not when it was written")
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged} in it does not match its checksum")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"it is damaged ({error})") from error
    value = torch.load(path, map_location="cpu", weights_only=True)
    _check_bounds(value, size)
    return value


def _check_bounds(value: Any, num_bytes: int) -> None:
    """A few bytes can say "ten of those, ten of those, …", which whoever walks through it would do for ever."""
    room, num_values = MAX_EXPANDED + num_bytes, 0
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        num_values += 1
        if isinstance(item, torch.Tensor):
            room -= item.numel() * item.element_size() if item.layout is torch.strided and not item.is_nested else 0
        elif isinstance(item, Mapping):
            stack += [(each, depth + 1) for pair in item.items() for each in pair]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            if not all(type(each) in _PLAIN for each in item):
                stack += [(each, depth + 1) for each in item]
            else:
                num_values += len(item)
        if num_values + len(stack) > MAX_VALUES or depth > MAX_DEPTH or room < 0:
            raise ValueError("it holds more, or deeper, than it can have been written with")


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


def misfits(cls: type, fields: Mapping[str, Any], path: str = "") -> list[str]:
    """Where fields for `rebuild`, read from JSON, are missing or of another type than the class declares."""
    hints, wrong = typing.get_type_hints(cls), []
    for each in dataclasses.fields(cls):
        if each.name in fields:
            wrong += _misfits_of(hints[each.name], fields[each.name], f"{path}{each.name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            wrong.append(f"{path}{each.name}")
    return wrong


def _misfits_of(hint: Any, value: Any, path: str) -> list[str]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for member in members:
        kind = typing.get_origin(member) or member
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return misfits(typing.cast(type, kind), value, f"{path}.")
        if kind in (list, tuple) and isinstance(value, list) and len(typing.get_args(member)) == 1:
            inner = typing.get_args(member)[0]
            return [each for index, item in enumerate(value) for each in _misfits_of(inner, item, f"{path}.{index}")]
        if kind is Any or (kind is dict and isinstance(value, Mapping)) or (kind is list and isinstance(value, list)):
            return []
        if kind is float and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
            return []
        if isinstance(kind, type) and kind is type(value):
            return []
    return [path]
