"""The host tensors from which tensors on a device were copied, to check their values without waiting for the device."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor


class Moved(NamedTuple):
    on_device: weakref.ref[Tensor]
    on_host: Tensor
    version: int
    """Of the tensor on the device: once it is written to, the original is none any more."""


_moved: dict[int, Moved] = {}
"""By the address of the memory on the device."""


def note_moved(on_device: Tensor, on_host: Tensor) -> None:
    """Remember the original for as long as the tensor lives."""
    if on_device.stride() != on_host.stride() or not on_host.numel():
        return  # a view of one would be another view of the other
    try:
        address, version = on_device.untyped_storage().data_ptr(), on_device._version
    except (RuntimeError, NotImplementedError):  # a device without addresses, or a tensor of inference mode
        return
    _moved[address] = Moved(weakref.ref(on_device, lambda _: _moved.pop(address, None)), on_host, version)


def original_of(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """For a tensor on a device that was moved there, or a view of one: the tensor that was moved, its original, and the same view of
    the original."""
    try:
        moved = _moved.get(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return None
    on_device = None if moved is None else moved.on_device()
    if moved is None or on_device is None or tensor.dtype != on_device.dtype or on_device._version != moved.version:
        return None
    offset = tensor.storage_offset() - on_device.storage_offset() + moved.on_host.storage_offset()
    return on_device, moved.on_host, torch.as_strided(moved.on_host, tensor.size(), tensor.stride(), offset)
