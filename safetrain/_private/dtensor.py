"""Which shard of a DTensor this process holds."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from .feature import Feature


def _probe() -> bool:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as compute

    return list(inspect.signature(compute).parameters)[:3] == ["global_shape", "mesh", "placements"]


PARTS = Feature(
    "dtensor_parts",
    relies_on="torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    lost="models that their owner has sharded in strides (tensor parallelism and FSDP2 on the same dimension)",
    instead="parts are computed for Shard and Replicate, all that loop.strategy=fsdp uses; another placement is an error at the start",
    probe=_probe,
)


def part_of(full: Tensor, like: Any) -> Tensor:
    """What this process has of `full` when it is sharded as the DTensor `like` is; a view."""
    mesh, placements = like.device_mesh, like.placements
    if PARTS.works:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
        return full[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            size, index = mesh.size(dim), mesh.get_local_rank(dim)
            length = full.shape[placement.dim]
            each = -(-length // size)  # as torch.chunk: the last ones may have less, or nothing
            begin, end = min(index * each, length), min((index + 1) * each, length)
            full = full.narrow(placement.dim, begin, end - begin)
    return full


def check_placements(model: nn.Module) -> None:
    """Before training starts: raises if a part of this model could not be computed."""
    if PARTS.works:
        return
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            kinds = {type(placement) for placement in parameter.placements}
            if kinds - {Shard, Replicate}:
                PARTS.require(f"shard {name} with Shard and Replicate only, or use another version of torch.")
