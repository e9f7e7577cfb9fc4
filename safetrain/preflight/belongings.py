"""What objects hold, remembered and put back: attributes, containers, random generators, small arrays.

A data set with a counter, a loss with a list of past values, a module that draws from a generator of its own: code that is
only called to look at it must find all that as it was.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import random
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensors.copies import overlaps_itself

MAX_ITEMS = 10_000
"""Longer containers are data, not state."""
MAX_OBJECTS = 20_000
MAX_BYTES, MAX_BYTES_IN_ALL = 64 * 2**20, 512 * 2**20
"""Larger tensors and arrays are data, not state."""
SMALL = 2**20
"""Larger ones are put back only at the end: comparing them takes time, and nothing but reading the data is likely to write there."""

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEFT_ALONE = (
    *(types.ModuleType, type, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.GeneratorType),
    *(str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size),
    *(threading.Thread, logging.Logger, io.IOBase, weakref.ref),
)
_FOREIGN = ("threading", "logging", "multiprocessing", "concurrent", "asyncio", "torch._", "torch.distributed")


class Belongings:
    """Walks from the roots to all that they hold. `known` are tensors that someone else takes care of."""

    def __init__(self, roots: Iterable[Any], known: Iterable[Tensor] = ()) -> None:
        self._seen: dict[int, Any] = {id(tensor): tensor for tensor in known}
        self._undo: list[Callable[[], None]] = []
        self._undo_large: list[Callable[[], None]] = []
        self._num_bytes = 0
        todo = deque(roots)
        while todo and len(self._seen) < MAX_OBJECTS:
            item = todo.popleft()
            if isinstance(item, _LEFT_ALONE) or id(item) in self._seen:
                continue
            self._seen[id(item)] = item  # also keeps it alive: the id must stay its own
            todo.extend(self._remember(item))

    def put_back(self, everything: bool = False) -> None:
        """Without `everything` large arrays stay as they are."""
        for undo in self._undo:
            undo()
        for undo in self._undo_large if everything else ():
            undo()

    def _remember(self, item: Any) -> Iterable[Any]:
        """Keep what restores it; returns what it holds."""
        if isinstance(item, _GENERATORS):
            self._undo.append(_restorer_of_generator(item))
            return ()
        if isinstance(item, (Tensor, np.ndarray)):
            self._keep_values(item)
            return ()
        if type(item) in _CONTAINERS:
            if len(item) >= MAX_ITEMS:
                return ()
            self._undo.append(_restorer_of_container(item))
            return list(item.values()) if isinstance(item, dict) else list(item)
        if isinstance(item, (tuple, frozenset)):
            return item if len(item) < MAX_ITEMS else ()
        if isinstance(item, functools.partial):
            return [item.func, *item.args, *item.keywords.values()]
        if inspect.ismethod(item):
            return [item.__self__, item.__func__]
        if inspect.isfunction(item):
            return self._remember_function(item)
        return self._remember_attributes(item)

    def _remember_attributes(self, item: Any) -> Iterable[Any]:
        own = getattr(item, "__dict__", None)
        if type(own) is not dict or type(item).__module__.startswith(_FOREIGN):
            return ()
        self._undo.append(_restorer_of_container(own))
        forward = getattr(type(item), "forward", None)
        return [*own.values(), *([forward] if inspect.isfunction(forward) else [])]

    def _remember_function(self, function: Any) -> Iterable[Any]:
        """Variables of the functions around it, and global ones that it names."""
        held = []
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not yet assigned
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        if (function.__module__ or "").partition(".")[0] in ("torch", "numpy", "safetrain"):
            return held
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        values = {name: function.__globals__[name] for name in names}
        state = {name: value for name, value in values.items() if not callable(value)}
        self._undo.append(functools.partial(function.__globals__.update, state))
        return [*held, *state.values(), *(value for value in values.values() if inspect.isfunction(value))]

    def _keep_values(self, array: Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(array, Tensor):
            plain = array.layout is torch.strided and array.grad_fn is None and not array.is_nested
            if not plain or overlaps_itself(array):
                return
        elif array.dtype.hasobject or not array.flags.writeable:
            return
        if array.nbytes > MAX_BYTES or self._num_bytes + array.nbytes > MAX_BYTES_IN_ALL:
            return
        self._num_bytes += array.nbytes
        undo = self._undo if array.nbytes <= SMALL else self._undo_large
        if isinstance(array, Tensor):
            undo.append(functools.partial(_copy_unless_equal, array.data, array.detach().clone()))
        else:
            undo.append(functools.partial(np.copyto, array, array.copy()))


def _copy_unless_equal(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):  # a tensor that may not be written to is not touched for nothing
        tensor.copy_(value)


def _restorer_of_container(container: Any) -> Callable[[], None]:
    content = list(container.items()) if isinstance(container, dict) else list(container)

    def restore() -> None:
        now = list(container.items()) if isinstance(container, dict) else list(container)
        if len(now) == len(content) and all(map(_is_same, now, content)):
            return
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(content)
        else:
            container.update(content)

    return restore


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def _restorer_of_generator(generator: Any) -> Callable[[], None]:
    if isinstance(generator, torch.Generator):
        at_first = generator.get_state()
        return lambda: _set_state(generator, at_first)
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", state)
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    return functools.partial(generator.setstate, generator.getstate())


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)
