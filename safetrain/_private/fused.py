"""Fused optimizers that skip an update on the device, by the attributes that torch's GradScaler uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .feature import Feature


def _probe() -> bool:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = SGD([parameter], lr=1.0, fused=True)
    skip_where(optimizer, torch.ones((), dtype=torch.bool))
    optimizer.step()
    skipped = parameter.tolist() == [1.0, 1.0]
    skip_where(optimizer, torch.zeros((), dtype=torch.bool))
    optimizer.step()
    return skipped and parameter.tolist() == [0.0, 0.0] and can_skip(optimizer)


SKIP = Feature(
    "skip_on_device",
    relies_on="found_inf and grad_scale of torch's fused optimizers",
    lost="loop.host_read_every above 1",
    instead="an error at the start of a run that asks for it",
    probe=_probe,
)


def can_skip(optimizer: Optimizer) -> bool:
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def skip_where(optimizer: Any, bad: Tensor) -> None:
    """The next steps do nothing where `bad` (0-d bool on the device) is true."""
    optimizer.found_inf, optimizer.grad_scale = bad.float(), None


def skip_nothing(optimizer: Optimizer) -> None:
    for name in ("found_inf", "grad_scale"):
        vars(optimizer).pop(name, None)
