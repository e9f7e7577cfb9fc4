"""Everything that replaying a step may disturb, remembered and put back."""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._private.storage import storage_identity
from ..tensors.rng import RandomState

_INTERNAL = set(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque)
MAX_ITEMS = 10_000
"""Longer containers are data, not state."""


class Sandbox:
    """`rewind()` before each replay: all is as before the step. `leave()` at the end: all is as it was found."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        parameters: list[nn.Parameter],
        random_state: RandomState | None,
        buffers: Mapping[str, Tensor] | None,
    ) -> None:
        self.loss_modules = list(modules_behind(loss_fn))
        self._modules = list(dict.fromkeys(m for root in (model, *self.loss_modules) for m in root.modules()))
        self._found_random = RandomState.capture()
        self._start_random = random_state or self._found_random
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._start_buffers = self._values_before(model, buffers or {})
        self._attributes = [(module, _attributes(module)) for module in self._modules]
        self._generators = [(g, _generator_state(g)) for g in _generators(self._modules, loss_fn)]
        self._parameters = parameters
        self._gradients = [p.grad for p in parameters]
        self._by_address = {_address(p): p for p in parameters}
        self._overwritten: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def _values_before(self, model: nn.Module, given: Mapping[str, Tensor]) -> list[Tensor]:
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        return [given.get(names.get(id(buffer), ""), value) for _, _, buffer, value in self._buffers]

    def before_write(self, tensor: Tensor) -> None:
        """Told by the tracer: some step functions write to parameters, and those are kept before the first write."""
        parameter = self._by_address.get(_address(tensor))
        if parameter is not None and id(parameter) not in self._overwritten:
            self._overwritten[id(parameter)] = (parameter, parameter.detach().clone())

    def rewind(self) -> None:
        self._restore(self._start_random, self._start_buffers)
        for parameter in self._parameters:
            parameter.grad = None

    def leave(self) -> None:
        self._restore(self._found_random, [value for *_, value in self._buffers])
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def _restore(self, random_state: RandomState, values: list[Tensor]) -> None:
        for (module, name, buffer, _), value in zip(self._buffers, values, strict=True):
            module._buffers[name] = buffer
            buffer.copy_(value)
        for parameter, value in self._overwritten.values():
            parameter.data.copy_(value)
        for module, attributes in self._attributes:
            _put_back(module, attributes)
        for generator, state in self._generators:
            _set_generator_state(generator, state)
        random_state.restore()

    def buffers_before(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for (module, name, _, _), value in zip(self._buffers, self._start_buffers, strict=True):
            yield module, name, value


def modules_behind(function: Any) -> Iterator[nn.Module]:
    """Modules that a function uses without being given them: a criterion in its closure, its globals, or bound to it."""
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, functools.partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from modules_behind(value)
    elif inspect.ismethod(function):
        yield from modules_behind(function.__self__) if isinstance(function.__self__, nn.Module) else ()
        yield from modules_behind(function.__func__)
    elif inspect.isfunction(function):
        yield from (value for value in _values_of(function) if isinstance(value, nn.Module))
    elif callable(function):
        yield from (value for value in getattr(function, "__dict__", {}).values() if isinstance(value, nn.Module))


def _values_of(function: Any) -> Iterator[Any]:
    """What a function's body can name: its closure and the globals it mentions."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]


def _address(tensor: Tensor) -> int:
    try:
        return storage_identity(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """All that a module holds besides parameters, buffers and children (counters, caches, lists), with what is in it."""
    return {name: (value, _content(value)) for name, value in module.__dict__.items() if name not in _INTERNAL}


def _content(value: Any) -> Any:
    if type(value) is Tensor and value.grad_fn is None and value.layout is torch.strided:
        return value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS and len(value) < MAX_ITEMS else None


def _put_back(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in module.__dict__ if name not in _INTERNAL and name not in attributes]:
        del module.__dict__[name]
    for name, (value, content) in attributes.items():
        module.__dict__[name] = value
        if content is None:
            continue
        if isinstance(value, Tensor):
            value.data.copy_(content)
        elif isinstance(value, (list, deque)):
            value.clear()
            value.extend(content)
        else:
            value.clear()
            value.update(content)


def _generators(modules: list[nn.Module], loss_fn: Callable[..., Any]) -> list[Any]:
    values = [value for module in modules for value in module.__dict__.values()]
    if inspect.isfunction(loss_fn):
        values += list(_values_of(loss_fn))
    kinds = (torch.Generator, np.random.Generator, random.Random)
    return list({id(value): value for value in values if isinstance(value, kinds)}.values())


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate()


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)
