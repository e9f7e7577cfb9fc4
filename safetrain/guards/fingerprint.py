"""Fingerprints of tensors: integers computed from their bits, which differ when a single bit does. All of it stays on
the device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..tensors.gradients import numbers_of
from ..tensors.sharded import local

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALL = 2048
_MASK = (1 << 24) - 1
"""Whole numbers up to here are exact in float32, in which the numbers of a step travel to the host."""


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """One number for each tensor. It differs for certain if one bit does, and by all odds if more do."""
    return torch.stack([_digest(_bits(tensor)) for tensor in tensors])


def _digest(bits: Tensor) -> Tensor:
    """An update whose sum is 0, as of the bias before a softmax, must not cancel out: in small tensors each place counts differently."""
    if bits.numel() > SMALL:  # by all odds it does not, because signs and exponents differ
        return bits.sum(dtype=torch.int64)
    return (bits.reshape(-1) * _factors(bits.device)[: bits.numel()]).sum()


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    return 2 * torch.arange(SMALL, dtype=torch.int64, device=device) + 1


def as_signal(digest: Tensor) -> Tensor:
    """0-d, exact in float32."""
    # A number would reach a backend written in Python as no tensor, which the operation wants.
    mask = torch.full((), _MASK, dtype=digest.dtype, device=digest.device)
    return (digest & mask).to(torch.float32)


def _bits(tensor: Tensor) -> Tensor:
    tensor = local(tensor.detach())
    tensor = tensor if tensor.layout is torch.strided else numbers_of(tensor)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


class Sample:
    """A few elements of a few tensors, which takes the same time however large the tensors are."""

    def __init__(self, tensors: Sequence[Tensor], num_tensors: int = 24, num_values: int = 32) -> None:
        usable = [t for t in map(_plain, tensors) if t is not None and t.numel()]
        kinds = Counter((t.dtype, t.device) for t in usable)
        kind = kinds.most_common(1)[0][0] if kinds else None
        usable = [t for t in usable if (t.dtype, t.device) == kind]
        chosen = usable[:: -(-len(usable) // num_tensors) or 1]
        self._addresses = [(t, t.data_ptr()) for t in chosen]
        self._parts = [_middle(t, num_values) for t in chosen]
        if self._parts:
            count, device = sum(part.numel() for part in self._parts), self._parts[0].device
            self._factors = 2 * torch.arange(count, device=device, dtype=torch.int64) + 1

    def take(self) -> Tensor | None:
        """A number that differs when one of the elements does."""
        if not self._parts:
            return None
        values = torch.cat(self._parts)
        return as_signal((values.view(_INTEGERS[values.element_size()]) * self._factors).sum())

    def is_current(self, tensors: Sequence[Tensor]) -> bool:
        """The tensors are still where they were: `p.data = …` gives a parameter another memory."""
        now = {t.data_ptr() for t in map(_plain, tensors) if t is not None}
        return all(address in now for _, address in self._addresses)


def _plain(tensor: Tensor) -> Tensor | None:
    tensor = local(tensor.detach())
    return tensor if tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex() else None


def _middle(tensor: Tensor, count: int) -> Tensor:
    flat = tensor.view(-1)
    start = max(0, (flat.numel() - count) // 2)
    return flat[start : start + count]
