"""Reinitialises weights that cannot be trained: dead from the first step on, or so large that values explode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def standardised(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """In the forward pass inside, each of these layers is scaled and shifted so that its outputs have mean 0 and deviation 1. Whatever
    the activations are, neither values nor gradients then grow or vanish over many layers."""
    hooks = [model.get_submodule(name).register_forward_hook(_Standardising()) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Standardising:
    def __init__(self) -> None:
        self._is_done = False

    @torch.no_grad()
    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor | None:
        if self._is_done:  # the module is called several times in a forward pass
            return None
        self._is_done = True
        channels = output.dim() - 1 if isinstance(module, nn.Linear) else 1
        others = [dim for dim in range(output.dim()) if dim != channels]
        mean = output.float().mean(others, keepdim=True)
        if module.bias is None:
            mean = torch.zeros_like(mean)
        deviation = (output.float() - mean).std()
        if not 1e-12 < float(deviation) < math.inf:
            return None
        module.weight.div_(deviation)
        if module.bias is not None:
            module.bias.copy_((module.bias - mean.flatten()) / deviation)
        return ((output.float() - mean) / deviation).to(output.dtype)
