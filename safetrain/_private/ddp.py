"""DistributedDataParallel: its buffers, and the gradient reduction of a rank that cannot run its own pass.

DDP exchanges gradients in buckets while backward runs. The private parts that this needs are those that its own `join` uses
for the same purpose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .feature import Feature

_REDUCER = ("_rebuild_buckets", "_get_zeros_like_grad_buckets", "_run_comm_hook")


def _probe_exchange() -> bool:
    """Without a process group there is no reducer to try."""
    reducer: Any = dist.Reducer  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroup
    for owner, name in [*((reducer, name) for name in _REDUCER), (group, "_get_sequence_number_for_group")]:
        getattr(owner, name)
    return True


EXCHANGE = Feature(
    "ddp_exchange",
    relies_on="Reducer._rebuild_buckets, _get_zeros_like_grad_buckets, _run_comm_hook, ProcessGroup._get_sequence_number_for_group",
    lost="training with DDP: a rank that raised in its step takes part in what the others exchange, so that none waits forever",
    instead="an error before training starts; one process and loop.strategy=fsdp work",
    probe=_probe_exchange,
)


def _probe_buffers() -> bool:
    return callable(DistributedDataParallel._sync_buffers)


BUFFERS = Feature(
    "ddp_buffers",
    relies_on="DistributedDataParallel._sync_buffers",
    lost="all buffers are sent to the other ranks in one piece",
    instead="each buffer is sent by itself, which is slower",
    probe=_probe_buffers,
)


def require() -> None:
    """Raises if this torch's DDP lacks what is needed. Call it before training starts."""
    EXCHANGE.require("use loop.strategy=fsdp, one process, or another version of torch.")


def leave_buffers_to_us(model: DistributedDataParallel) -> None:
    """DDP would send them around in every forward pass, which a rank that failed does not come to."""
    for name in ("broadcast_buffers", "forward_sync_buffers"):  # the second is its name from torch 2.13 on
        if hasattr(model, name):
            setattr(model, name, False)


def sync_buffers(model: DistributedDataParallel) -> None:
    """Those of rank 0 on every rank, as DDP does before a forward pass. All ranks must call it."""
    if BUFFERS.works:
        model._sync_buffers()  # type: ignore[no-untyped-call]
        return
    with torch.no_grad():
        for buffer in model.module.buffers():
            value = buffer.detach().contiguous()
            dist.broadcast(value, 0)
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)


def num_collectives(group: Any = None) -> int:
    """How many the group (None: the default one) has begun: how else to know how many buckets DDP has sent off."""
    of: Any = dist.group.WORLD if group is None else group
    return int(of._get_sequence_number_for_group())


def exchange_zeros(model: DistributedDataParallel, num_reduced: int, began_forward: bool, poison: bool) -> bool:
    """Take part, with zeros or NaN (`poison`), in the exchange of all buckets but the first `num_reduced`.

    False: there was nothing left to take part in.
    """
    reducer = model.reducer
    if not began_forward:
        reducer._rebuild_buckets()  # what the forward pass would have begun with
    left = reducer._get_zeros_like_grad_buckets()[num_reduced:]
    for bucket in left:
        if poison:
            bucket.buffer().fill_(math.nan)
        reducer._run_comm_hook(bucket).wait()
    return bool(left)
