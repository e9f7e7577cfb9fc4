"""A multi-layer perceptron on a table: regression and two-class classification. Run it with `safetrain fit tabular`."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Maps features [batch, num_features] to one number per row: a value, or the logit of a class."""

    def __init__(self, num_features: int, width: int = 64, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [num_features, *[width] * depth]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.SiLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


def regression_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Mean squared error, and R² of this batch: 1 is perfect, 0 equals predicting the mean of the batch."""
    features, targets = batch
    squared_error = F.mse_loss(model(features), targets)
    metrics = {"loss": squared_error}
    if not model.training:  # on the whole evaluation data at once; meaningless on a small training batch
        metrics["r2"] = 1 - squared_error / targets.var(correction=0)
    return metrics


def classification_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor], from_probabilities: bool = False
) -> dict[str, Tensor]:
    """Binary cross-entropy. `from_probabilities` uses the textbook formula, which is not safe: see the broken config."""
    features, targets = batch
    logits = model(features)
    if from_probabilities:
        p = torch.sigmoid(logits)
        loss = -(targets * torch.log(p) + (1 - targets) * torch.log(1 - p)).mean()
    else:
        loss = F.binary_cross_entropy_with_logits(logits, targets)
    accuracy = ((logits > 0) == (targets > 0.5)).float().mean()
    return {"loss": loss, "accuracy": accuracy}
