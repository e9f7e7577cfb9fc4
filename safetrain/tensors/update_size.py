"""How large the updates are, relative to the weights: measured on the device, on a sample of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .sharded import local

SAMPLED = 256
"""Elements looked at in each tensor, evenly spread over it; all of a small one. The norm of an update is known to a few percent by
that, and a large model costs no second copy of its weights."""


class UpdateSize:
    """Of a sharded weight, only this process's part is looked at; of a model on several devices, only the first one's."""

    def __init__(self, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
        self._weights = [
            p for p in trained if p.device == trained[0].device and p.layout is torch.strided and p.element_size() > 1
        ]
        self._views: list[Tensor] = []
        self._scales = torch.empty(0)
        self._addresses: list[int] = []
        self._before: Tensor | None = None
        self._step = -1
        self._size: Tensor | None = None
        self._restored: float | None = None

    @torch.no_grad()
    def of_last_update(self) -> float | None:
        """What the next step will measure. Waits for the device."""
        if self._before is None:
            return self._restored
        now = self._now()
        return float(_relative(now - self._before, now)) if now.shape == self._before.shape else None

    def restore(self, size: float | None) -> None:
        """The weights were replaced by those of another time; `size` is what `of_last_update` said then."""
        self._before = self._size = None
        self._step, self._restored = -1, size

    @torch.no_grad()
    def measure(self, step: int) -> Tensor | None:
        """Norm of the change since the step before, over that of the weights. None in the first step; the same when the step is
        measured once more."""
        if step == self._step or not self._weights:
            return self._size
        self._step = step
        now, before, restored = self._now(), self._before, self._restored
        self._before, self._restored, self._size = now, None, None
        if before is not None and before.shape == now.shape:
            self._size = _relative(now - before, now)
        elif restored is not None:
            self._size = torch.tensor(restored, device=now.device)
        return self._size

    def _now(self) -> Tensor:
        if (addresses := [weight.data_ptr() for weight in self._weights]) != self._addresses:
            self._addresses = addresses
            self._look_at()
        return torch.cat(self._views).float() * self._scales

    def _look_at(self) -> None:
        weights = [local(weight.detach()) for weight in self._weights]
        self._views = [_sample(weight) for weight in weights]
        # Each element stands for those that were left out.
        counts = [(max(w.numel(), 1) / max(v.numel(), 1)) ** 0.5 for w, v in zip(weights, self._views, strict=True)]
        sizes = torch.tensor([view.numel() for view in self._views])
        self._scales = torch.tensor(counts).repeat_interleave(sizes).to(self._weights[0].device)


def _relative(change: Tensor, weights: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(change) / (torch.linalg.vector_norm(weights) + 1e-12)
    return size


def _sample(weight: Tensor) -> Tensor:
    """A view: the optimizer writes the weight in place."""
    flat = torch.as_strided(weight, (weight.numel(),), (1,)) if _is_dense(weight) else weight.reshape(-1)[:0]
    return flat[:: -(-flat.numel() // SAMPLED)] if flat.numel() > SAMPLED else flat


def _is_dense(weight: Tensor) -> bool:
    """Its elements fill one piece of memory, in whatever order: contiguous, channels last, transposed."""
    expected = 1
    for stride, size in sorted(zip(weight.stride(), weight.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
