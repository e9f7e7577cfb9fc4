"""Everything that replaying a step may disturb, captured and restored."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._private.storage import storage_identity
from ..tensors.devices import note_in_use
from ..tensors.rng import GENERATORS, RandomState
from ..tensors.saved import Captured, on_host

_INTERNAL = set(vars(nn.Module())) - {"training"}
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
        note_in_use(parameter.device for parameter in parameters)
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
        held = [value for _, attributes in self._attributes for value in attributes.values()]
        self._held = Captured([*held, *_generators(loss_fn)], [buffer for _, _, buffer, _ in self._buffers], MAX_ITEMS)
        self._parameters = parameters
        self._gradients = [p.grad for p in parameters]
        # Libraries keep notes on a parameter itself: the gradients of each sample, how many forwards wait for their backward.
        self._notes = [dict(vars(p)) for p in parameters]
        self._by_address = {_address(p): p for p in parameters}
        self._overwritten: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def _values_before(self, model: nn.Module, given: Mapping[str, Tensor]) -> list[Tensor]:
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        return [given.get(names.get(id(buffer), ""), value) for _, _, buffer, value in self._buffers]

    def before_write(self, tensor: Tensor) -> None:
        """The tracer calls it: some step functions write to parameters, and those are copied before the first write."""
        parameter = self._by_address.get(_address(tensor))
        if parameter is not None and id(parameter) not in self._overwritten:
            self._overwritten[id(parameter)] = (parameter, on_host(parameter))

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
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for parameter, notes in zip(self._parameters, self._notes, strict=True):
            if vars(parameter) or notes:
                vars(parameter).clear()
                vars(parameter).update(notes)
        self._held.restore()
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All that a module holds besides parameters, buffers and children: counters, caches, lists."""
    return {name: value for name, value in module.__dict__.items() if name not in _INTERNAL}


def _generators(loss_fn: Callable[..., Any]) -> list[Any]:
    values = _values_of(loss_fn) if inspect.isfunction(loss_fn) else ()
    return [value for value in values if isinstance(value, GENERATORS)]
