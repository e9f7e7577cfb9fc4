"""Samples the weights around an update: how far it moves them, and how they are distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors.devices import can_pin, is_host, recorded_event

if TYPE_CHECKING:
    from .sink import Telemetry

SECONDS = 2.0
"""Between two measurements of the update, each of which takes about a millisecond."""
NUM_TENSORS, NUM_VALUES = 32, 1024
"""The update is estimated from this many tensors, and this many values of each."""


class UpdateRatio:
    """‖update‖ / ‖weights‖ over all trained parameters, estimated from a part of their values.

    About 1e-3 is usual; much more and training is about to diverge, much less and it does not move.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        every = max(1, len(parameters) // NUM_TENSORS)
        filled = [_local(p) for p in parameters[::every] if _local(p).numel()]
        chosen = [p for p in filled if p.device == filled[0].device][:NUM_TENSORS]
        self._samples = [(p, max(1, p.numel() // NUM_VALUES)) for p in chosen]
        self._shares: Tensor | None = None
        self._before: Tensor | None = None
        self._pair: Arriving | None = None
        self.due_at = -math.inf

    def before_update(self) -> None:
        if self._samples:
            self._before = self._values()

    def after_update(self, *_: object) -> None:
        if self._before is None:
            return
        if self._shares is None:  # each value stands for all that were passed over, up to the next one
            counts = [-(-p.numel() // stride) for p, stride in self._samples]
            shares = torch.tensor([float(stride) for _, stride in self._samples], device=self._before.device).sqrt()
            self._shares = shares.repeat_interleave(torch.tensor(counts, device=shares.device))
        moved = (self._values() - self._before) * self._shares
        self._pair = Arriving(torch.stack([moved.norm(), (self._before * self._shares).norm()]))
        self._before, self.due_at = None, perf_counter() + SECONDS

    def _values(self) -> Tensor:
        """Values at even distances in each tensor, copied into one vector."""
        return torch.cat([tensor.detach().reshape(-1)[::stride].float() for tensor, stride in self._samples])

    def read(self) -> float:
        """Of the newest update that was looked at; NaN when there is none new."""
        if self._pair is None or not self._pair.is_here:
            return math.nan
        (moved, weights), self._pair = self._pair.numbers, None
        return moved / weights if weights > 0 else math.nan


class Arriving:
    """Numbers on their way from the device. No step waits for them, so they cost no host read."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: Any = None
        self._numbers = numbers.detach()
        if not is_host(numbers.device) and can_pin():
            on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            on_host.copy_(numbers, non_blocking=True)
            if (event := recorded_event(numbers.device)) is not None:
                self._numbers, self._event = on_host, event

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    @property
    def numbers(self) -> list[float]:
        values: list[float] = self._numbers.cpu().numpy().tolist()
        return values


def _local(tensor: Tensor) -> Tensor:
    """This process's part of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _weights_and_gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
            if tensor is not None and tensor.is_floating_point() and tensor.numel() and not tensor.is_sparse:
                found[f"tensors/{kind}/{name}"] = _local(tensor).detach()
    return found


@contextmanager
def watching(
    model: nn.Module,
    optimizer: Optimizer,
    telemetry: Telemetry,
    step: Callable[[], int],
    histograms_every: int | None = None,
) -> Iterator[None]:
    """Measure updates until the end of the block. Changes nothing, and draws no random number."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.is_floating_point()]
    ratio = UpdateRatio(trained)
    num_shown = 0
    telemetry.vitals.gauges["health/update_ratio"] = ratio.read

    def before(*_: object) -> None:
        if telemetry.is_busy:  # an update that is only tried
            return
        nonlocal num_shown
        if perf_counter() >= ratio.due_at:
            ratio.before_update()
        if histograms_every is not None and step() // histograms_every >= num_shown:
            num_shown = step() // histograms_every + 1
            telemetry.tensors(_weights_and_gradients(model), step())

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(ratio.after_update))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del telemetry.vitals.gauges["health/update_ratio"]
