"""An exponential moving average of the weights. Buffers are not averaged: the model's own go with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._private import foreach
from ..distributed.comm import gather
from ..tensors.devices import widest_float
from ..tensors.sharded import is_dtensor, local


class Ema:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        averaged = {name: p for name, p in model.named_parameters() if _can_be_averaged(p)}
        self._parameters = list(averaged.values())
        self.weights = {name: parameter.detach().clone() for name, parameter in averaged.items()}
        """By the names of `model.named_parameters()`; without integers, and without what is infinite on purpose."""

    @torch.no_grad()
    def update(self, refused: Tensor | None = None) -> None:
        """Take in the weights of a committed step. `refused` (0-d bool): decide on the device whether it was one."""
        averages, current = self._values()
        if refused is None:
            foreach.lerp_(averages, current, 1.0 - self._decay)
            return
        share = torch.full((), 1.0 - self._decay, dtype=widest_float(refused.device), device=refused.device)
        share = share.masked_fill(refused, 0.0)
        for average, weight in zip(averages, current, strict=True):
            average.lerp_(weight, share.to(average.dtype))

    @torch.no_grad()
    def start_again(self) -> None:
        """With the weights as they are now."""
        for average, weight in zip(*self._values(), strict=True):
            average.copy_(weight)

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
        for average, current in zip(
            *self._values(), strict=True
        ):  # one at a time: a device may not hold a third copy of all
            own = current.clone()
            current.copy_(average)
            average.copy_(own)

    def _values(self) -> tuple[list[Tensor], list[Tensor]]:
        """Averages and weights: of a sharded model, this process's shards."""
        return [local(average) for average in self.weights.values()], [local(p.detach()) for p in self._parameters]

    def state_dict(self) -> dict[str, Any]:
        """Loadable into the model: its own state_dict with the averages in the places of the weights."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        state: dict[str, Any] = self._model.state_dict(keep_vars=True)
        own = {key: value.detach() if isinstance(value, Tensor) else value for key, value in state.items()}
        return {key: self.weights.get(names.get(id(state[key]), ""), value) for key, value in own.items()}


def _can_be_averaged(parameter: Tensor) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    is_finite = not is_number or bool(torch.isfinite(local(parameter)).all())
    return (
        is_number and parameter.element_size() > 1 and all(gather(is_finite) if is_dtensor(parameter) else [is_finite])
    )
