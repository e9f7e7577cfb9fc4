"""The fp16 loss scaler: torch's own, and what it has seen of the present step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    """A `torch.amp.GradScaler` that can also forget a step, or be asked to react to one that had no gradients."""

    def __init__(self, device_type: str) -> None:
        self._scaler = torch.amp.GradScaler(device_type)
        self._is_unscaled = self._has_gradients = False

    @property
    def is_enabled(self) -> bool:
        return self._scaler.is_enabled()

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def current(self, device: torch.device) -> Tensor:
        """The loss scale, on the device."""
        return self._scaler.scale(torch.ones((), device=device))

    def unscale(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """The gradients of all these parameters, the optimizer's and others, in their true size to the end of the step."""
        self._is_unscaled = True
        self._has_gradients = any(p.grad is not None for p in parameters)
        self._scaler.unscale_(optimizer)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if others := [p for p in parameters if id(p) not in stepped and p.grad is not None]:
            # The scaler knows gradients by their optimizer. This one is never stepped.
            self._others = torch.optim.SGD(others, lr=0.0)
            self._scaler.unscale_(self._others)

    def update(self) -> None:
        """React to this step: lower after an overflow, higher after a long run without."""
        if self._has_gradients:
            self._scaler.update()
        else:  # nothing to learn from
            self._scaler.update(self._scaler.get_scale())
        self._is_unscaled = self._has_gradients = False

    def keep(self, scale: float) -> None:
        """Forget this step; the scale stays as it was."""
        if self._is_unscaled:
            self._scaler.update(scale)
        self._is_unscaled = self._has_gradients = False

    def state_dict(self) -> dict[str, Any]:
        """The scale and its history. Waits for the device."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)
