"""Autocast and the fp16 loss scaler of a step. Both are torch's own on every device: accelerate would silently ignore fp16 on
the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError
from . import islands
from .autocast import AUTOCAST_DTYPES

_NOTHING = nullcontext()


class Precision:
    def __init__(self, name: str, device: torch.device, model: nn.Module | None = None) -> None:
        """`name`: `fp32`, `bf16` or `fp16`. `model`: the one whose fp32 islands autocast respects."""
        self.name, self.device, self._model = name, device, model
        self._dtype = AUTOCAST_DTYPES[name]
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._is_unscaled = self._has_gradients = False  # what the scaler has seen of the present step
        if model is not None and name == "fp16" and any(p.dtype == torch.float16 for p in model.parameters()):
            raise UsageError(
                "loop.precision=fp16 needs parameters in float32 (autocast converts them), and this model has some in float16.\n"
                "To fix: call model.float() first."
            )
        self._check_in_effect()

    def _check_in_effect(self) -> None:
        if self._dtype is not None:
            x = torch.ones(2, 2, device=self.device)
            with torch.autocast(self.device.type, dtype=self._dtype):
                effective = (x @ x).dtype
            if effective != self._dtype:
                raise UsageError(
                    f"loop.precision={self.name} is not in effect on {self.device.type}: a product came out as {effective}.\n"
                    "To fix: use loop.precision=fp32 on this device."
                )
        if self._scaler is not None and not self._scaler.is_enabled():
            raise UsageError(
                f"the fp16 loss scaler is not available on {self.device.type}.\nTo fix: use loop.precision=bf16 or fp32."
            )

    @property
    def has_scaler(self) -> bool:
        """fp16: a gradient that is not finite is, at first, the loss scaler's business."""
        return self._scaler is not None

    def autocast(self) -> AbstractContextManager[object]:
        """For a training step: around all of it, or inside the model only if the loss is an fp32 island."""
        if self._dtype is None:
            return _NOTHING
        return islands.autocast(self._model, self.device.type, self._dtype)

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """The gradients of all these parameters, the optimizer's and others, in their true size to the end of the step."""
        if self._scaler is None:
            return
        self._is_unscaled = True
        self._has_gradients = any(p.grad is not None for p in parameters)
        self._scaler.unscale_(optimizer)
        self._unscale_others(self._scaler, optimizer, parameters)

    def _unscale_others(self, scaler: torch.amp.GradScaler, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if others := [p for p in parameters if id(p) not in moved and p.grad is not None]:
            # The scaler knows gradients by their optimizer. This one is never stepped.
            self._for_unmoved = torch.optim.SGD(others, lr=0.0)
            scaler.unscale_(self._for_unmoved)

    def loss_scale(self) -> Tensor | None:
        """fp16: the current loss scale, on the device."""
        return None if self._scaler is None else self._scaler.scale(torch.ones((), device=self.device))

    def host_loss_scale(self) -> float:
        """fp16: the current loss scale; 1 otherwise. Waits for the device."""
        scale = self.loss_scale()
        return 1.0 if scale is None else float(scale)

    def update_scale(self) -> None:
        """fp16: let the scaler react to this step: lower after an overflow, higher after a long run without."""
        if self._scaler is None:
            return
        if self._has_gradients:
            self._scaler.update()
        else:  # there was no gradient to learn from
            self._scaler.update(self._scaler.get_scale())
        self._is_unscaled = self._has_gradients = False

    def keep_scale(self, scale: float) -> None:
        """fp16: forget this step; the scale stays as it was."""
        if self._scaler is not None and self._is_unscaled:
            self._scaler.update(scale)
        self._is_unscaled = self._has_gradients = False

    def state_dict(self) -> dict[str, Any] | None:
        """fp16: the loss scale and its history. Waits for the device."""
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
