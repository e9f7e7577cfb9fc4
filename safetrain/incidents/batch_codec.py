"""Converts a batch to types that `torch.load(weights_only=True)` accepts, and back.

Tensors, numbers, strings, lists, tuples and dicts stay what they are. An object of any other class is taken apart as pickle
would do it and kept with the name of its class, so that who reads the file decides whether that class may be imported. That is
why this walks through a batch in its own way: objects that no other walker opens must come back, with their classes named.
"""

from __future__ import annotations

import copyreg
import inspect
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..checkpoint.plain import from_loadable, to_loadable
from ..errors import UsageError

_TAG = "__safetrain__"
_KNOWN: dict[str, type] = {
    f"{cls.__module__}.{cls.__qualname__}": cls
    for cls in (list, dict, set, frozenset, int, float, str, bool, OrderedDict, defaultdict, PackedSequence)
}
"""Classes that are known here, so that nothing is imported for them."""

ImportClass = Callable[[str], Any]


def encode(value: Any) -> Any:
    """Tensors are copied to the host, without the part of their storage that is not in the batch. Raises what pickling an object
    raises."""
    if isinstance(value, Tensor):
        return _on_host(value)
    if value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return to_loadable(value, "the batch")
    if type(value) in (list, tuple):
        return type(value)(encode(item) for item in value)
    if type(value) is dict:
        return {encode(key): encode(item) for key, item in value.items()}
    if inspect.isclass(value):
        return {_TAG: "class", "class": _target_of(value)}
    return _encode_object(value)


def _encode_object(value: Any) -> dict[str, Any]:
    function, arguments, state, items, pairs = (*value.__reduce_ex__(2), None, None, None)[:5]
    is_new = function is copyreg.__newobj__  # type: ignore[attr-defined]
    if is_new:
        function, *arguments = arguments
    if not inspect.isclass(function):
        raise UsageError(f"a {type(value).__name__} in the batch cannot be kept so that it is safe to load.")
    return {
        _TAG: "object",
        "class": _target_of(function),
        "is_new": is_new,
        "arguments": [encode(argument) for argument in arguments],
        "state": encode(state),
        "items": None if items is None else [encode(item) for item in items],
        "pairs": None if pairs is None else [[encode(key), encode(item)] for key, item in pairs],
    }


def decode(value: Any, import_class: ImportClass) -> Any:
    """What `encode` was given. `import_class` gets the target of each class that is needed, and may refuse."""
    if type(value) in (list, tuple):
        return type(value)(decode(item, import_class) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == "class":
        return _class(value["class"], import_class)
    if kind == "object":
        return _decode_object(value, import_class)
    if kind is not None:
        return from_loadable(value)
    return {decode(key, import_class): decode(item, import_class) for key, item in value.items()}


def _decode_object(value: dict[str, Any], import_class: ImportClass) -> Any:
    cls = _class(value["class"], import_class)
    arguments = decode(value["arguments"], import_class)
    made = cls.__new__(cls, *arguments) if value["is_new"] else cls(*arguments)
    state = decode(value["state"], import_class)
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        for part in state if isinstance(state, tuple) else (state,):  # a second part is for slots
            for name, item in (part or {}).items():
                object.__setattr__(made, name, item)  # also if it is frozen
    if value["items"] is not None:
        made.extend(decode(value["items"], import_class))
    for key, item in decode(value["pairs"], import_class) or ():
        made[key] = item
    return made


def _class(target: str, import_class: ImportClass) -> Any:
    return _KNOWN.get(target) or import_class(target)


def _target_of(cls: type) -> str:
    """As in a config: `package.module.Name`, or `file.py:Name` for a class of a file that is not in a package."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if "<locals>" in name:
        raise UsageError(f"{name} cannot be found again, because it was made inside a function.")
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if name in _KNOWN or file is None or "." in cls.__module__ or "site-packages" in file or not file.endswith(".py"):
        return name
    return f"{os.path.abspath(file)}:{cls.__qualname__}"


def _on_host(tensor: Tensor) -> Tensor:
    kept = tensor.detach().cpu()
    if kept.layout is torch.strided and kept.untyped_storage().nbytes() > kept.numel() * kept.element_size():
        kept = kept.clone()  # a file holds whole storages, and this is a piece of one
    return kept.requires_grad_(tensor.requires_grad)
