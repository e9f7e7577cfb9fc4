"""The random state of Python and NumPy, taken anew only when it has changed.

Most training steps draw from torch alone, and building these two states costs 60 µs: as much as a small step. Whether they
have changed is seen in a microsecond, by comparing the memory of the generators: the position in the table of the Mersenne
twister, which moves with every draw, and sixteen words of the table, which are others after a seed or when it was filled anew.
(A table that somebody has made up out of another one could share them.) Where that memory cannot be looked at (another Python,
another generator), the state is taken every time.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from typing import Any

import numpy as np

_HEAD = object.__basicsize__
_TABLE, _POSITION, _BESIDE = 624 * 4, 4, 64
"""Bytes of the table, of the position in it, and of the words that are looked at."""


_GENERATOR: Any = getattr(np.random, "get_bit_generator", lambda: None)


class PythonSource:
    def __init__(self) -> None:
        self._generator: Any = getattr(random, "_inst", None)
        self._memory: bytes | None = None
        self._state: Any = None
        self._look: Any = None
        if isinstance(self._generator, random.Random) and _sees_draws():
            self._look = _memory_of(self._generator)

    def state(self) -> Any:
        """What `random.getstate()` returns."""
        if self._look is None:
            return random.getstate()
        memory = self._look.raw
        # A second normal number is kept beside the table, for the next call of random.gauss().
        if memory != self._memory or self._state[2] != self._generator.gauss_next:
            self._memory, self._state = memory, random.getstate()
        return self._state


class NumpySource:
    def __init__(self) -> None:
        self._generator: Any = None
        self._look: Any = None
        self._memory: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """What `numpy.random.get_state(legacy=False)` returns."""
        generator = _GENERATOR()
        if generator is not self._generator:
            self._generator, self._memory = generator, None
            is_known = type(generator) is np.random.MT19937
            self._look = None
            if is_known:
                end_of_table = generator.ctypes.state_address + _TABLE  # where the position is
                self._look = _bytes_at(end_of_table - _BESIDE, _BESIDE + _POSITION)
        if self._look is None:
            return np.random.get_state(legacy=False)
        memory = self._look.raw
        # A second normal number that is kept for later lies elsewhere; while there is one, its use would not be seen.
        if memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return self._state


def _bytes_at(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """A view of memory, whose `raw` are the bytes of now."""
    return (ctypes.c_char * size).from_address(address)


def _memory_of(generator: random.Random) -> ctypes.Array[ctypes.c_char]:
    return _bytes_at(id(generator) + _HEAD, _POSITION + _BESIDE)


def _sees_draws() -> bool:
    """Whether the memory of a generator is where it is looked for: it changes with a draw, and comes back with the seed."""
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ - _HEAD < _TABLE + _POSITION:
        return False
    generator = random.Random(0)
    memory = _memory_of(generator)
    fresh = memory.raw
    generator.getrandbits(32)
    drawn = memory.raw
    generator.seed(0)
    if drawn == fresh or memory.raw != fresh:
        return False
    for _ in range(624):  # to the same position in a new table
        generator.getrandbits(32)
    return memory.raw[:_POSITION] == fresh[:_POSITION] and memory.raw[_POSITION:] != fresh[_POSITION:]
