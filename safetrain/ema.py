"""An exponential moving average of the weights, with the model's current buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    @torch.no_grad()
    def update(self, refused: Tensor | None = None) -> None:
        """Take in the weights of a committed step. `refused` (0-d bool): decide on the device whether it was one."""
        weights = [p.detach() for p in self._model.parameters()]
        averages = list(self.weights.values())
        if refused is None:
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay)
        else:
            share = torch.where(refused, 0.0, 1.0 - self._decay)
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, share.to(average.dtype))
        # Buffers are restored when a step is refused, so they are always those of the last committed step.
        for name, buffer in self._model.named_buffers():
            self.buffers[name] = (
                buffer.detach().clone() if name not in self.buffers else self.buffers[name].copy_(buffer)
            )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the average inside, with its own weights again afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        weights = [p.detach() for p in self._model.parameters()]
        own = [w.clone() for w in weights]
        averages = list(self.weights.values())
        torch._foreach_copy_(weights, averages)
        torch._foreach_copy_(averages, own)

    def state_dict(self) -> dict[str, Tensor]:
        """Loadable into the model."""
        return {**self.weights, **self.buffers}
