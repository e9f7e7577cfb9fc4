"""A checksum of a tensor's bits, computed on its device: to see whether it has changed since it was copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sharded import local

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor (of a sharded one, of this process's part), in one transfer for each device. Equal bits give equal numbers; a
    changed value, and values that changed places, give others, short of a coincidence. Takes no memory worth mentioning."""
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    found = [0] * len(tensors)
    for indices in by_device.values():
        numbers: list[int] = torch.stack([_checksum(tensors[index]) for index in indices]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            found[index] = number
    return found


def _checksum(tensor: Tensor) -> Tensor:
    flat = local(tensor.detach()).contiguous().reshape(-1)
    if flat.dtype is torch.bool:
        flat = flat.to(torch.int8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    bits = flat.view(_INTEGERS[flat.element_size()])
    width = 1 << max(0, (bits.numel().bit_length() - 1) // 2)
    whole = bits[: bits.numel() // width * width].reshape(-1, width)
    # Of each row and of each column: values that changed places are in others then.
    sums = [whole.sum(0, dtype=torch.int64), whole.sum(1, dtype=torch.int64), bits[whole.numel() :].to(torch.int64)]
    numbers = torch.cat(sums)
    return (numbers * (torch.arange(numbers.numel(), device=numbers.device) * 2 + _PRIME)).sum()
