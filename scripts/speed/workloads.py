"""What is trained: a model, its batches and its loss. The same seed gives the same numbers to every variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BATCHES = 64


@dataclass
class Workload:
    model: nn.Module
    batches: list[Any]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Residual(nn.Module):
    """x + 0.1 tanh(layer(x)), layer after layer: stays learnable at any depth."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def classes(shape: tuple[int, ...], num_classes: int) -> list[Any]:
    """Batches whose classes can be learned: they follow from the inputs."""
    teacher = torch.randn(torch.Size(shape[1:]).numel(), num_classes)
    inputs = [torch.randn(shape) for _ in range(NUM_BATCHES)]
    return [(x, (x.flatten(1) @ teacher).argmax(1)) for x in inputs]


def mlp(width: int = 64, num_layers: int = 3) -> Workload:
    sizes = [32, *[width] * (num_layers - 1), 10]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return Workload(nn.Sequential(*layers[:-1]), classes((32, 32), 10))


def gpt() -> Workload:
    from recipes.char_gpt import CharGPT

    context, vocabulary = 64, 96
    model = CharGPT(context=context, width=128, depth=4, num_heads=4)
    tokens = [
        torch.randint(1, vocabulary, (8, context // 2)).repeat(1, 3)[:, : context + 1] for _ in range(NUM_BATCHES)
    ]
    return Workload(model, [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens])


def resnet() -> Workload:
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16), nn.MaxPool2d(2), Block(16), Block(16), nn.MaxPool2d(2), Block(16)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return Workload(model, classes((16, 3, 32, 32), 10))


def many() -> Workload:
    return Workload(Residual(200, 8), classes((8, 8), 8))


def parameters(count: int) -> Workload:
    """An MLP of about this many parameters."""
    return mlp(width=max(8, round((count / 2) ** 0.5)), num_layers=4)


def modules(count: int) -> Workload:
    return Workload(Residual(count, 8), classes((8, 8), 8))


WORKLOADS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "gpt": gpt, "resnet": resnet, "many": many}
TITLES = {"mlp": "tiny MLP", "gpt": "small GPT", "resnet": "small ResNet", "many": "400 small tensors"}


def make(name: str) -> Workload:
    """By name; `parameters:10000` and `modules:100` for the scaling runs."""
    torch.manual_seed(0)
    kind, _, count = name.partition(":")
    if count:
        return {"parameters": parameters, "modules": modules}[kind](int(count))
    return WORKLOADS[name]()
