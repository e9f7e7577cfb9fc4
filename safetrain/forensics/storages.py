"""Memory that tensors share: which storage a tensor lies in, and which part of it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._private.autograd import unwrapped
from .._private.storage import sparse_values, storage_identity

EVERYTHING = 1 << 60


class Region(NamedTuple):
    """A part of a storage: which one, and from which element to which."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


class Storages:
    """Numbers for storages, unique over their lifetimes, that keep no memory alive.

    Addresses are reused at once. The Python object of a storage lives as long as its memory, so its weak reference
    dies exactly when the address may be reused.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._count = 0

    def region(self, tensor: Tensor) -> Region:
        tensor = unwrapped(tensor)
        if tensor.layout is torch.sparse_coo:
            return Region(self._number(sparse_values(tensor)), 0, EVERYTHING)
        if tensor.layout is not torch.strided:
            try:
                return Region(self._number(tensor.values()), 0, EVERYTHING)
            except RuntimeError:
                return Region(-id(tensor), 0, EVERYTHING)
        start = stop = int(tensor.storage_offset())
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if size == 0:
                return Region(self._number(tensor), start, start)
            stop += (size - 1) * abs(stride)
        return Region(self._number(tensor), start, stop + 1)

    def _number(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return -id(tensor)
        address = storage_identity(storage)
        number = self._numbers.get(address)
        if number is None:
            self._count += 1
            number = self._numbers[address] = self._count
            self._references[number] = weakref.ref(storage, partial(_forget, self._numbers, address))
        return number


def _forget(numbers: dict[int, int], address: int, _: Any) -> None:
    numbers.pop(address, None)
