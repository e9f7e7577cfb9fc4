"""The model under DistributedDataParallel, kept in sync with the other replicas when this rank cannot run its pass.

DDP exchanges gradients in buckets while backward runs, so a rank whose forward or backward raised must still take part in
as many exchanges as the others, in the same order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._private import ddp


class Replicas:
    def __init__(self, wrap: Callable[[], nn.Module]) -> None:
        ddp.require()
        self._wrap_model = wrap
        self._before_backward: int | None = None
        self.has_entered = False
        """The model has been called in this attempt."""
        self.has_order = False
        """DDP has seen a backward, whose order of gradients it uses for its buckets from then on."""
        self._wrap()

    def _wrap(self) -> None:
        wrapped = self._wrap_model()
        assert isinstance(wrapped, DistributedDataParallel)
        # Buffers are synchronised by `sync_buffers`, at a moment that every rank reaches whatever its forward does.
        ddp.leave_buffers_to_us(wrapped)
        wrapped.register_forward_pre_hook(lambda *_: setattr(self, "has_entered", True))
        self.model: DistributedDataParallel | None = wrapped
        self._has_buffers = any(True for _ in wrapped.module.buffers())

    def begin(self) -> None:
        """A new attempt at a step."""
        self._before_backward, self.has_entered = None, False

    def begin_backward(self) -> None:
        """From here on the default process group is used by DDP alone."""
        self._before_backward = ddp.num_collectives()
        self.has_order = True

    def sync_buffers(self) -> None:
        """Broadcast the buffers of rank 0, as DDP does before a forward pass."""
        if self._has_buffers and self.model is not None:
            ddp.sync_buffers(self.model)

    def stand_in(self, poison: bool = False) -> bool:
        """Take part in what is left of the others' exchange of gradients, with zeros.

        `poison`: with NaN, because this rank has already reported its step as fine. Returns False if nothing was left to
        take part in.
        """
        assert self.model is not None
        num_reduced = 0 if self._before_backward is None else ddp.num_collectives() - self._before_backward
        return ddp.exchange_zeros(self.model, num_reduced, self.has_entered, poison)

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
