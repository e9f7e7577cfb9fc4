"""Histograms of weights and gradients, taken before the update every N steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.hooks import before_step
from ..tensors.sharded import local

if TYPE_CHECKING:
    from .sink import Telemetry


def _weights_and_gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
            if tensor is not None and tensor.is_floating_point() and tensor.numel() and not tensor.is_sparse:
                found[f"tensors/{kind}/{name}"] = local(tensor).detach()
    return found


@contextmanager
def logging_histograms(
    model: nn.Module, optimizer: Optimizer, telemetry: Telemetry, step: Callable[[], int], every: int
) -> Iterator[None]:
    """Until the end of the block. Changes nothing, and draws no random number."""
    num_logged = 0

    def before(*_: object) -> None:
        nonlocal num_logged
        if not telemetry.is_busy and step() // every >= num_logged:  # busy: the update is only tried
            num_logged = step() // every + 1
            telemetry.tensors(_weights_and_gradients(model), step())

    hook = before_step(optimizer, before)
    try:
        yield
    finally:
        hook.remove()
