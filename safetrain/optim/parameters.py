"""Which parameters a step trains."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def members_of(optimizer: Optimizer) -> list[int]:
    """The identities of what it updates: another list when a parameter or a group has joined, left or been replaced."""
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def all_parameters(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """The model's parameters in its own order, then those that only the optimizer has (of a loss with weights, say)."""
    unique = {id(p): p for p in model.parameters()}
    for group in optimizer.param_groups:
        unique.update({id(p): p for p in group["params"] if id(p) not in unique})
    return list(unique.values())
