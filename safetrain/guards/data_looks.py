"""Checks the first batches: the same batch repeated, or the same sample in every row."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.comm import num_processes
from ..tensors.devices import wide
from ..tensors.nest import tensors_in
from .fingerprint import as_signal

MOST = 512
"""Values of a tensor that are looked at."""


class BatchLooks:
    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None

    def measure(self, window: Sequence[Any], like: Tensor) -> dict[str, Tensor]:
        """`batch`: a number made of the batch. `same_object`: the tensor of the step before, which is so on purpose. `alike`: every
        sample is the same one."""
        tensors = [t for t in tensors_in(window[0]) if t.layout is torch.strided and t.numel()] if window else []
        if not tensors:
            return {}
        is_same = self._last is not None and self._last() is not None and _same_memory(self._last(), tensors[0])
        self._last = weakref.ref(tensors[0])
        digest = torch.stack([_digest(t) for t in tensors[:4]]).sum()
        signals = {"batch": as_signal(digest).to(like.device), "same_object": like.new_full((), float(is_same))}
        if num_processes() > 1:  # the largest and the smallest over the ranks
            signals["batch_negative"] = -signals["batch"]
        first = tensors[0].detach()
        if first.dim() > 0 and len(first) >= 4 and first[0].numel() > 1:
            signals["alike"] = (first[1:] == first[:1]).all().to(like.device, like.dtype)
        return signals


def _same_memory(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.data_ptr() == other.data_ptr()


def _digest(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    values = wide(flat[:: -(-flat.numel() // MOST)]).nan_to_num()
    factors = torch.arange(1, values.numel() + 1, device=values.device, dtype=values.dtype)
    total = (values * factors.sqrt()).sum()
    if total.dtype is torch.float64:
        return total.view(torch.int64) >> 16
    return total.view(torch.int32).to(torch.int64)  # a device without float64
