"""The model under DistributedDataParallel, kept in step with its other replicas when this rank cannot run its pass.

DDP exchanges gradients in buckets while backward runs, so a rank whose forward or backward raised must still take part in
as many exchanges as the others, in the same order. The private parts of DDP that this needs are those that its `join`
uses for the same purpose; they are used in this file only.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Replicas:
    def __init__(self, wrap: Callable[[], nn.Module]) -> None:
        self._wrap_model = wrap
        self._before_backward: int | None = None
        self._entered = False
        self.has_order = False
        """DDP has seen a backward, whose order of gradients it uses for its buckets from then on."""
        self._wrap()

    def _wrap(self) -> None:
        wrapped = self._wrap_model()
        assert isinstance(wrapped, DistributedDataParallel)
        # Buffers are synchronised by `sync_buffers`, at a moment that every rank reaches whatever its forward does.
        for name in ("broadcast_buffers", "forward_sync_buffers"):  # the second is its name from torch 2.13 on
            if hasattr(wrapped, name):
                setattr(wrapped, name, False)
        wrapped.register_forward_pre_hook(lambda *_: setattr(self, "_entered", True))
        self.model: DistributedDataParallel | None = wrapped
        self._has_buffers = any(True for _ in wrapped.module.buffers())

    def begin(self) -> None:
        """A new attempt at a step."""
        self._before_backward, self._entered = None, False

    def begin_backward(self) -> None:
        """From here on the default process group is used by DDP alone."""
        self._before_backward = _num_collectives()
        self.has_order = True

    def sync_buffers(self) -> None:
        """Broadcast the buffers of rank 0, as DDP does before a forward pass."""
        if self._has_buffers and self.model is not None:
            self.model._sync_buffers()  # type: ignore[no-untyped-call]

    def stand_in(self, poison: bool = False) -> bool:
        """Take part in what is left of the others' exchange of gradients, with zeros.

        `poison`: with NaN, because this rank has already reported its step as fine. Returns False if nothing was left to
        take part in.
        """
        model = self.model
        assert model is not None
        if not self._entered:
            model.reducer._rebuild_buckets()  # the first thing that its forward would have done
        num_reduced = 0 if self._before_backward is None else _num_collectives() - self._before_backward
        left = model.reducer._get_zeros_like_grad_buckets()[num_reduced:]
        for bucket in left:
            if poison:
                bucket.buffer().fill_(math.nan)
            model.reducer._run_comm_hook(bucket).wait()
        return bool(left)

    def rewrap(self) -> nn.Module:
        """After a step that some rank did not run to its end, on all ranks at once: its reducer cannot be used again."""
        self.close()
        self.has_order = False
        self._wrap()
        assert self.model is not None
        return self.model

    def close(self) -> None:
        """A live DDP model can hang the end of its process group."""
        self.model = None
        gc.collect()


def _num_collectives() -> int:
    """The number of collectives the default process group has started, which counts the buckets that DDP has sent."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())
