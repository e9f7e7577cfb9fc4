"""Models and data that are unusual on purpose give no warnings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from preflight_cases import make_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from safetrain import SafeTrainer, check
from safetrain.preflight import FAIL, WARN


class LowRank(nn.Module):
    """A frozen layer with a trained correction that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(16, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.frozen(x) + self.up(self.down(x))))


def low_rank() -> SafeTrainer:
    x = torch.randn(256, 16)
    return make_trainer(TensorDataset(x, x[:, :3].argmax(1)), LowRank(), lr=1e-2)


class Encoder(nn.Module):
    """Padded sequences, attention that does not see the padding, positions that start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, padding_idx=0)
        self.positions = nn.Parameter(torch.zeros(1, 20, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        states = self.layer(self.embedding(tokens) + self.positions, src_key_padding_mask=padding)
        return self.head(states.masked_fill(padding[..., None], 0).mean(1))


def padded_sequences() -> SafeTrainer:
    tokens = torch.randint(1, 50, (256, 20))
    tokens[torch.arange(20) >= torch.randint(5, 20, (256, 1))] = 0
    return make_trainer(TensorDataset(tokens, tokens[:, :5].sum(1) % 3), Encoder(), lr=1e-3)


def segmentation() -> SafeTrainer:
    """With 255 for pixels that do not count, all over the image."""
    images = torch.randn(128, 1, 12, 12)
    masks = (images[:, 0] * 2).clamp(0, 3).long()
    masks[torch.rand(masks.shape) < 0.1] = 255
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=255)

    return make_trainer(TensorDataset(images, masks), model, loss)


def policy_gradient() -> SafeTrainer:
    """A loss that starts near zero and may go below."""
    x, actions, advantages = torch.randn(256, 16), torch.randint(0, 3, (256,)), torch.randn(256)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        log_probs = F.log_softmax(model(batch[0]), 1).gather(1, batch[1][:, None])[:, 0]
        return -(log_probs * (batch[2] - batch[2].mean())).mean()

    return make_trainer(TensorDataset(x, actions, advantages), nn.Linear(16, 3), loss)


class Pairs(nn.Module):
    """Two views of one thing, compared with all others of the batch at a low temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 8), nn.Linear(16, 8)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.normalize(self.one(x), dim=1), F.normalize(self.other(x + 0.1 * torch.randn_like(x)), dim=1)
        return self.temperature.exp() * one @ other.T


def contrastive_pairs() -> SafeTrainer:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])))

    return make_trainer(TensorDataset(torch.randn(256, 16)), Pairs(), loss)


@pytest.mark.parametrize("build", [low_rank, padded_sequences, segmentation, policy_gradient, contrastive_pairs])
def test_an_unusual_healthy_model_gives_no_warning(build: Callable[[], SafeTrainer]) -> None:
    report = check(build(), budget=30)
    assert [(each.name, each.reason) for each in report.with_status(FAIL)] == []
    assert [(each.name, each.reason) for each in report.with_status(WARN)] == []
    assert not [each for each in report.checks if "the check itself failed" in each.reason]
