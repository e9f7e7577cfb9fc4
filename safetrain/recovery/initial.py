"""A new start for weights that nothing can be learned from: dead from the first step on, or so large that values explode."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..tensors.sharded import is_sharded

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LARGE, SMALL, LARGE_BIAS = 3.0, 0.02, 5.0
"""Times the deviation that keeps the size of values from layer to layer; and the typical bias that no input outweighs."""


def odd_layers(model: nn.Module) -> list[str]:
    """Layers whose weights are of the wrong size."""
    if is_sharded(model):
        return []
    found = []
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and module.weight.requires_grad and module.weight.is_floating_point():
            size = float(module.weight.detach().float().square().mean().sqrt()) / kaiming(module.weight)
            bias = 0.0 if module.bias is None else float(module.bias.detach().float().abs().mean())
            if not SMALL <= size <= LARGE or not bias <= LARGE_BIAS:
                found.append(name)
    return found


def all_layers(model: nn.Module) -> list[str]:
    return [
        name for name, module in model.named_modules() if isinstance(module, LAYERS) and module.weight.requires_grad
    ]


def kaiming(weight: Tensor) -> float:
    """The deviation at which a layer before a ReLU keeps the variance of its inputs."""
    return math.sqrt(2.0 / max(1, weight[0].numel()))


@torch.no_grad()
def reinitialise(model: nn.Module, names: list[str], seed: int) -> None:
    """Variance-preserving weights and biases of 0: the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, LAYERS)
        drawn = torch.randn(module.weight.shape, generator=generator) * kaiming(module.weight)
        module.weight.copy_(drawn.to(module.weight))
        if module.bias is not None:
            module.bias.zero_()
