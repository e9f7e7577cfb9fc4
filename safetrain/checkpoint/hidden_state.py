"""What an optimizer of the user's keeps in attributes, outside of `state`, and its own `state_dict` leaves out.

Numbers, text, tensors, and lists and dictionaries of those are saved and restored with it. Tensors in anything else cannot be, and that is
said when the run starts or when they appear.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tensors.saved import give_values

_PASSING = {"grad_scale", "found_inf", "_opt_called", "_step_count"}
"""What torch and schedulers leave there between two calls."""


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Those that can be saved, as they are now."""
    return {name: value for name, value in _own(optimizer) if _is_plain(value, _parameters(optimizer))}


def unsaved(optimizer: Optimizer) -> list[str]:
    """Names of those that hold tensors and cannot be saved."""
    ours = _parameters(optimizer)
    return [name for name, value in _own(optimizer) if not _is_plain(value, ours) and _holds_tensors(value, ours)]


def warn_of_unsaved(optimizer: Optimizer, told: set[str], warn: Callable[[str], None]) -> None:
    """Once for each of them."""
    for name in [each for each in unsaved(optimizer) if each not in told]:
        told.add(name)
        warn(
            f"{type(optimizer).__name__} keeps tensors in .{name}, outside of its state: a rollback and a resume leave them as they are. To fix: "
            "keep them in self.state[parameter], or define state_dict and load_state_dict"
        )


@torch.no_grad()
def restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        current = vars(optimizer).get(name)
        if isinstance(value, Tensor) and isinstance(current, Tensor) and current.shape == value.shape:
            give_values(current, value)
        else:
            setattr(optimizer, name, _copied(value))


def _own(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """Nothing of an optimizer of torch's or ours, nor of one that saves itself in its own way."""
    cls = type(optimizer)
    if cls.__module__.partition(".")[0] in ("torch", "safetrain") or cls.state_dict is not Optimizer.state_dict:
        return []
    known = _known_names()
    return [(name, value) for name, value in vars(optimizer).items() if name not in known]


@functools.cache
def _known_names() -> frozenset[str]:
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    return frozenset(vars(plain)) | _PASSING


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _is_plain(value: Any, parameters: set[int]) -> bool:
    if isinstance(value, Tensor):
        return id(value) not in parameters and value.layout is torch.strided
    if type(value) in (list, tuple, deque):
        return all(_is_plain(item, parameters) for item in value)
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item, parameters) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str)


def _holds_tensors(value: Any, parameters: set[int]) -> bool:
    if isinstance(value, Tensor):
        return id(value) not in parameters
    if isinstance(value, dict):
        return any(_holds_tensors(item, parameters) for item in value.values())
    return isinstance(value, (list, tuple, set, deque)) and any(_holds_tensors(item, parameters) for item in value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple, deque)) else value
