"""The numbers of a step on the device, packed so that they reach the host in one transfer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..core.view import UNBOUNDED
from ..tensors.devices import is_host, widest_float


class Measurement:
    """Losses, gradient norm, guards' signals and metrics of one step, in one small vector."""

    limits = UNBOUNDED
    """Bounds that the gradient will be clipped to."""

    def __init__(
        self,
        losses: Sequence[Tensor],
        grad_norm: Tensor,
        loss_scale: Tensor | None,
        signals: Mapping[str, Tensor],
        metrics: Sequence[Mapping[str, Any]],
        window: Sequence[Any] = (),
        rates: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """`rates`: learning rates that are on the device, by the index of their group."""
        self.grad_norm = grad_norm
        self.window = window
        self.num_losses = len(losses)
        self._signal_names = list(signals)
        self._has_scale, self._rates = loss_scale is not None, rates
        # What is on the host already is not sent to the device and back.
        self._metrics = [
            (name, float(value) if isinstance(value, Tensor) and _is_elsewhere(value, grad_norm) else value)
            for each in metrics
            for name, value in each.items()
        ]
        numbers = [*losses, grad_norm]
        if loss_scale is not None:
            numbers.append(loss_scale)
        numbers += signals.values()
        numbers += [rate.reshape(()) for rate in rates.values()]
        numbers += [value.detach().reshape(()) for _, value in self._metrics if isinstance(value, Tensor)]
        self.vector = _pack(numbers, grad_norm.device)

    def read(self) -> dict[str, Any]:
        """The numbers on the host, in one transfer, under the names that `StepView` gives them."""
        return self.unpack(self.vector.tolist())

    def losses_and_norm(self) -> Tensor:
        """The numbers that must be finite for the step to be applied."""
        return self.vector[: self.num_losses + 1]

    def unpack(self, numbers: Sequence[float]) -> dict[str, Any]:
        """The vector's numbers under the names that `StepView` gives them."""
        count = self.num_losses
        micro_losses = tuple(numbers[:count])
        named: dict[str, Any] = {
            "loss": micro_losses[0] if count == 1 else sum(micro_losses) / count,
            "micro_losses": micro_losses,
            "grad_norm": numbers[count],
            "loss_scale": 1.0,
            "signals": {},
            "metrics": {},
            "window": self._window_while_measured(),
        }
        if len(numbers) > count + 1 or self._metrics:
            values = iter(numbers[count + 1 :])
            if self._has_scale:
                named["loss_scale"] = next(values)
            named["signals"] = {name: next(values) for name in self._signal_names}
            if self._rates:
                named["rates"] = {index: next(values) for index in self._rates}
            if self._metrics:
                metrics = [next(values) if isinstance(v, Tensor) else float(v) for _, v in self._metrics]
                named["metrics"] = self._mean_metrics(metrics)
        return named

    def _window_while_measured(self) -> Callable[[], Sequence[Any]]:
        measurement = weakref.ref(self)  # the view may be kept for long, and must not keep the batches alive
        return lambda: () if (alive := measurement()) is None else alive.window

    def _mean_metrics(self, values: Sequence[float]) -> dict[str, float]:
        by_name: dict[str, list[float]] = {}
        for (name, _), value in zip(self._metrics, values, strict=True):
            by_name.setdefault(name, []).append(value)
        return {name: sum(each) / len(each) for name, each in by_name.items()}


def _pack(tensors: list[Tensor], device: torch.device) -> Tensor:
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or tensor.device != device:
            break
    else:
        return torch.stack(tensors)
    widest = widest_float(device)
    return torch.stack(
        [
            # A number that is on the host is sent with the operation that makes the tensor, not as a copy that is waited for.
            torch.full((), float(t), dtype=widest, device=device)
            if is_host(t.device) and not is_host(device)
            else t.to(device, widest)
            for t in tensors
        ]
    )


def _is_elsewhere(value: Tensor, like: Tensor) -> bool:
    return is_host(value.device) and not is_host(like.device)
