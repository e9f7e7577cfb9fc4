"""Captures and restores what objects hold: attributes, containers, random generators, small arrays.

A data set with a counter, a loss with a list of past values, a module that draws from a generator of its own: code that is
only called to look at it must find all that as it was.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensors.rng import GENERATORS
from ..tensors.saved import CONTAINERS, Captured, is_state, restorer_of_container
from .sources import ListSource

MAX_ITEMS = 10_000
"""Longer containers are data, not state."""
MAX_OBJECTS = 20_000
MAX_BYTES, MAX_BYTES_IN_ALL = 64 * 2**20, 512 * 2**20
"""Larger tensors and arrays are data, not state."""
SMALL = 2**20
"""Larger ones are restored only at the end: comparing them takes time, and nothing but reading the data is likely to write there."""

_FOREIGN = ("threading", "logging", "multiprocessing", "concurrent", "asyncio", "torch._", "torch.distributed")


class Belongings(Captured):
    """Also what is reached through attributes and functions, and arrays of NumPy; within limits."""

    # A list of batches is only read, and copied before it is used; it may be all of the data.
    left_alone = (
        ListSource,
        *(types.ModuleType, type, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.GeneratorType),
        *(*Captured.left_alone, torch.dtype, torch.device, torch.Size),
        *(threading.Thread, logging.Logger, io.IOBase, weakref.ref),
    )

    def __init__(self, roots: Iterable[Any], known: Iterable[Any] = ()) -> None:
        self._restorers_of_large: list[Callable[[], None]] = []
        self._num_bytes = 0
        super().__init__(roots, known, MAX_ITEMS)

    @property
    def has_room(self) -> bool:
        return len(self._seen) < MAX_OBJECTS

    def restore(self, everything: bool = False) -> None:
        """Without `everything` large arrays stay as they are."""
        super().restore()
        for restorer in self._restorers_of_large if everything else ():
            restorer()

    def capture(self, item: Any) -> Iterable[Any]:
        if isinstance(item, (Tensor, np.ndarray)):
            self._capture_values(item)
            return ()
        if isinstance(item, (*GENERATORS, tuple, frozenset)) or type(item) in CONTAINERS:
            return super().capture(item)
        if isinstance(item, functools.partial):
            return [item.func, *item.args, *item.keywords.values()]
        if inspect.ismethod(item):
            return [item.__self__, item.__func__]
        if inspect.isfunction(item):
            return self._capture_function(item)
        return self._capture_attributes(item)

    def _capture_attributes(self, item: Any) -> Iterable[Any]:
        own = getattr(item, "__dict__", None)
        if type(own) is not dict or type(item).__module__.startswith(_FOREIGN):
            return ()
        self._restorers.append(restorer_of_container(own))
        forward = getattr(type(item), "forward", None)
        return [*own.values(), *([forward] if inspect.isfunction(forward) else [])]

    def _capture_function(self, function: Any) -> Iterable[Any]:
        """Variables of the functions around it, and global ones that it names."""
        held = []
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not yet assigned
                continue
            self._restorers.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        if (function.__module__ or "").partition(".")[0] in ("torch", "numpy", "safetrain"):
            return held
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        values = {name: function.__globals__[name] for name in names}
        state = {name: value for name, value in values.items() if not callable(value)}
        self._restorers.append(functools.partial(function.__globals__.update, state))
        return [*held, *state.values(), *(value for value in values.values() if inspect.isfunction(value))]

    def _capture_values(self, array: Tensor | np.ndarray[Any, Any]) -> None:
        if isinstance(array, Tensor):
            if not is_state(array):
                return
        elif array.dtype.hasobject or not array.flags.writeable:
            return
        if array.nbytes > MAX_BYTES or self._num_bytes + array.nbytes > MAX_BYTES_IN_ALL:
            return
        self._num_bytes += array.nbytes
        restorers = self._restorers if array.nbytes <= SMALL else self._restorers_of_large
        if isinstance(array, Tensor):
            restorers.append(functools.partial(_copy_unless_equal, array.data, array.detach().clone()))
        else:
            restorers.append(functools.partial(np.copyto, array, array.copy()))


def _copy_unless_equal(tensor: Tensor, value: Tensor) -> None:
    if not torch.equal(tensor, value):  # a tensor that may not be written to is not touched for nothing
        tensor.copy_(value)
