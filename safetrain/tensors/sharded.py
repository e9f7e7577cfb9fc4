"""Tensors of a model that FSDP2 has sharded over the processes.

Each process holds one part of every parameter, of its gradient, of its moments and of its average (a `DTensor`); a block's
parameters are whole only while the block computes. Copies, audits and checks look at a process's own part and then agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .._private import dtensor


def is_dtensor(tensor: Any) -> bool:
    """Whether each process holds a part of it only."""
    known = sys.modules.get("torch.distributed.tensor")  # importing it is slow; before that, there is no DTensor
    return known is not None and isinstance(tensor, known.DTensor)


def any_dtensor(tensors: Iterable[Any]) -> bool:
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and any(isinstance(tensor, known.DTensor) for tensor in tensors)


def is_sharded(model: nn.Module) -> bool:
    return any_dtensor(model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This process's part, in the same memory; a tensor that is not sharded is all here."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it, on every process. Every process must ask for it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm over all processes' parts, equal on each; what is not sharded counts once. Every process must ask for it."""
    sharded, others = [t for t in tensors if is_dtensor(t)], [t for t in tensors if not is_dtensor(t)]
    norms = [full_tensor(get_total_norm(sharded)), *([get_total_norm(others)] if others else [])]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
    """Memory for the values of a tensor, sharded as it is."""
    own = local(tensor)
    memory = torch.empty(own.shape, dtype=dtype or own.dtype, device=own.device if device is None else device)
    return sharded_as(memory, tensor)


def sharded_as(part: Tensor, tensor: Tensor) -> Tensor:
    """This process's part of values that are sharded as the tensor is, if it is."""
    return _from_part(part, tensor) if is_dtensor(tensor) else part


def shard_like(full: Tensor, tensor: Tensor) -> Tensor:
    """The values of `full`, which every process has all of, sharded as `tensor` is."""
    if not is_dtensor(tensor) or is_dtensor(full) or full.shape != tensor.shape:
        return full
    return _from_part(dtensor.part_of(full, tensor).to(local(tensor).device, copy=True), tensor)


def _from_part(part: Tensor, tensor: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def put(target: Tensor, saved: Tensor) -> None:
    """Give the tensor these values, in place. `saved` is sharded as it is, or whole."""
    local(target).copy_(local(shard_like(saved, target)))
