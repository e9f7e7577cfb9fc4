"""State that the user's modules and optimizers keep in attributes outside `state_dict`; of modules, only random
generators.

Of an optimizer also numbers, text, tensors, other optimizers, and lists and dictionaries of those are saved and restored with it, dictionaries
by parameter too, or by the `id` of one, which is another after a resume. Tensors in anything else cannot be saved, and that is said when the run starts or when they appear.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors.rng import GENERATORS, restore_generator, state_of_generator
from ..tensors.saved import give_values

_Parameters = dict[int, tuple[int, Tensor]]
_PASSING = {"grad_scale", "found_inf", "_opt_called", "_step_count"}
"""What torch and schedulers leave there between two calls."""


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Those that can be saved, as they are now."""
    ours, found = _parameters(optimizer), {}
    for name, value in _own(optimizer):
        if isinstance(value, Optimizer):
            found[name] = {_STATE: value.state_dict()}
        elif isinstance(value, GENERATORS):
            found[name] = {_STATE: state_of_generator(value)}
        elif _is_plain(value, ours):
            found[name] = _by_position(value, ours)
    return found


def generators_of(roots: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The states of the random generators that modules keep in attributes, by root, module and attribute."""
    return {name: state_of_generator(generator) for name, generator in _generators(roots)}


def restore_generators(roots: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> None:
    for name, generator in _generators(roots):
        if name in saved:
            restore_generator(generator, saved[name])


def _generators(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    for root, model in roots.items():
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, GENERATORS):
                    yield f"{root}:{path}.{name}", value


def unsaved(optimizer: Optimizer) -> list[str]:
    """Names of those that hold tensors and cannot be saved."""
    ours = _parameters(optimizer)
    return [
        name
        for name, value in _own(optimizer)
        if not (isinstance(value, (Optimizer, *GENERATORS)) or _is_plain(value, ours)) and _holds_tensors(value, ours)
    ]


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
    positions = list(_parameters(optimizer).values())
    for name, value in saved.items():
        current = vars(optimizer).get(name)
        if isinstance(value, dict) and _STATE in value:
            if isinstance(current, Optimizer):
                current.load_state_dict(_copied(value[_STATE]))
            elif isinstance(current, GENERATORS):
                restore_generator(current, value[_STATE])
            continue
        value = _by_parameter(value, positions)
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


def _parameters(optimizer: Optimizer) -> _Parameters:
    """Position and parameter, by `id`, in order."""
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return {key: (position, p) for position, (key, p) in enumerate(parameters.items())}


_STATE = "\0state"
_KEY, _ID = "\0parameter ", "\0id of parameter "


def _by_position(value: Any, ours: _Parameters) -> Any:
    """The value with the positions of parameters in place of parameters and their ids, where those are keys."""
    if type(value) is dict:
        return {_saved_key(key, ours): _by_position(item, ours) for key, item in value.items()}
    return [_by_position(item, ours) for item in value] if type(value) is list else value


def _saved_key(key: Any, ours: _Parameters) -> Any:
    if isinstance(key, Tensor):
        return f"{_KEY}{ours[id(key)][0]}"
    return f"{_ID}{ours[key][0]}" if type(key) is int and key in ours else key


def _by_parameter(value: Any, positions: list[tuple[int, Tensor]]) -> Any:
    """The inverse of `_by_position`."""
    if type(value) is dict:
        return {_restored_key(key, positions): _by_parameter(item, positions) for key, item in value.items()}
    return [_by_parameter(item, positions) for item in value] if type(value) is list else value


def _restored_key(key: Any, positions: list[tuple[int, Tensor]]) -> Any:
    for prefix in (_KEY, _ID):
        if type(key) is str and key.startswith(prefix):
            parameter = positions[int(key.removeprefix(prefix))][1]
            return parameter if prefix == _KEY else id(parameter)
    return key


def _is_plain(value: Any, ours: _Parameters) -> bool:
    if isinstance(value, Tensor):
        return id(value) not in ours and value.layout is torch.strided
    if type(value) in (list, tuple, deque):
        return all(_is_plain(item, ours) for item in value)
    if type(value) is dict:
        return all(
            (type(key) in (str, int) or id(key) in ours) and _is_plain(item, ours) for key, item in value.items()
        )
    return value is None or type(value) in (bool, int, float, complex, str)


def _holds_tensors(value: Any, parameters: _Parameters) -> bool:
    if isinstance(value, (Tensor, Optimizer, *GENERATORS)):
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
