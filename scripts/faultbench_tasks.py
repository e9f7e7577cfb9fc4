"""The training tasks of scripts/faultbench: a small GPT, an MLP and a convolutional network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.char_gpt import CharGPT, Documents, document_loss
from recipes.shared.datasets import read_columns

STEPS = 300


@dataclass
class Task:
    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batches: list[Any]
    evaluation: Any
    lr: float
    inputs: Callable[[Any], Tensor]
    """The tensor of a batch into which faults are injected."""
    corrupt: Callable[[Any], Any]
    """A finite but corrupted batch."""


class Scaled(nn.Module):
    """The inner layer, with intermediate values that overflow in half precision."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.factor) / self.factor


def mlp(seed: int, overflowing: bool) -> Task:
    random = torch.Generator().manual_seed(seed)
    directions = torch.randn(16, 2, generator=random) / 4

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 16, generator=random)
        return x, torch.tanh(x @ directions).sum(1, keepdim=True) + 0.5 * torch.randn(size, 1, generator=random)

    torch.manual_seed(seed)
    middle: nn.Module = nn.Linear(64, 64)
    middle = Scaled(middle, 1e6) if overflowing else middle
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), middle, nn.ReLU(), nn.Linear(64, 1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]).float(), batch[1])

    def corrupt(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], 20.0 - 20.0 * batch[1]

    return Task(model, loss, [batch(64) for _ in range(STEPS)], batch(4096), 5e-3, lambda b: b[0], corrupt)


def convnet(seed: int, overflowing: bool) -> Task:
    columns = read_columns("digits")
    images, labels = (
        torch.from_numpy(columns["images"]).float().reshape(-1, 1, 8, 8) / 16,
        torch.from_numpy(columns["labels"]).long(),
    )
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=random)
    train, held_out = order[:1437], order[1437:]

    def batch(indices: Tensor) -> tuple[Tensor, Tensor]:
        return images[indices].clone(), labels[indices].clone()

    torch.manual_seed(seed)
    last: nn.Module = nn.Linear(32 * 4, 10)
    last = Scaled(last, 1e6) if overflowing else last
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), last),
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=0.1)

    def corrupt(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0] * 8.0, (batch[1] + 3) % 10

    batches = [batch(train[torch.randint(len(train), (48,), generator=random)]) for _ in range(STEPS)]
    return Task(model, loss, batches, batch(held_out), 3e-3, lambda b: b[0], corrupt)


class EmbeddedGPT(CharGPT):
    """The GPT with a scale on its embeddings, as a floating-point input for faults."""

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens)
        x = (x if scale is None else x * scale[:, None, None]) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(seed: int, overflowing: bool) -> Task:
    context, size = 32, 24
    train, held_out = Documents("train", context, size * STEPS), Documents("eval", context, 256)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=random).tolist()

    def batch(data: Documents, indices: Any) -> dict[str, Tensor]:
        tokens = torch.stack([data[i]["tokens"] for i in indices])
        return {"tokens": tokens, "scale": torch.ones(len(tokens))}

    torch.manual_seed(seed)
    model = EmbeddedGPT(context, width=32)
    if overflowing:
        model.blocks[1].mlp[2] = Scaled(model.blocks[1].mlp[2], 1e6)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        def scaled(tokens: Tensor) -> Tensor:
            return model(tokens, batch["scale"]).float()

        return document_loss(scaled, batch)["loss"]  # type: ignore[arg-type]

    def corrupt(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            **batch,
            "tokens": torch.randint(1, 96, batch["tokens"].shape, generator=random),
            "scale": batch["scale"],
        }

    batches = [batch(train, order[i * size : (i + 1) * size]) for i in range(STEPS)]
    return Task(model, loss, batches, batch(held_out, range(256)), 3e-3, lambda b: b["scale"], corrupt)


TASKS = {"gpt": gpt, "mlp": mlp, "convnet": convnet}
