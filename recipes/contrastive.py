"""Learns embeddings in which images of the same class are close. Run it with `safetrain fit contrastive`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedder(nn.Module):
    """Images to points on the unit sphere.

    The raw embeddings are first standardised over the batch, dimension by dimension, so that none of them collapses; in
    evaluation by the running mean and standard deviation, like BatchNorm.
    """

    running_mean: Tensor
    running_std: Tensor

    def __init__(self, channels: int = 1, width: int = 32, num_dimensions: int = 16, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, num_dimensions),
        )
        self.register_buffer("running_mean", torch.zeros(num_dimensions))
        self.register_buffer("running_std", torch.ones(num_dimensions))

    def forward(self, images: Tensor) -> Tensor:
        raw = self.features(images)
        if self.training:
            mean = raw.mean(0)
            std = raw.std(0) + 1e-3  # of a single image this is 0/0: keep data.drop_last on
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_std.lerp_(std.detach(), self.momentum)
        else:
            mean, std = self.running_mean, self.running_std
        return F.normalize((raw - mean) / std, dim=1)


def info_nce(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """InfoNCE: each image must identify the others of its class among all images of the batch."""
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    same = (labels[:, None] == labels) & others
    similarity = embeddings @ embeddings.T / temperature
    log_p = similarity - similarity.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return -(log_p * same).sum() / same.sum()


def triplet(embeddings: Tensor, labels: Tensor, margin: float) -> Tensor:
    """The farthest image of the same class must be nearer by a margin than the nearest of another class."""
    distance = 2 - 2 * embeddings @ embeddings.T  # squared, of unit vectors
    same = labels[:, None] == labels
    farthest = distance.masked_fill(~same, -torch.inf).amax(1)
    nearest = distance.masked_fill(same, torch.inf).amin(1)
    return F.relu(farthest - nearest + margin).mean()


def contrastive_loss(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    kind: str = "info_nce",
    temperature: float = 0.1,
    margin: float = 0.5,
) -> dict[str, Tensor]:
    """`info_nce` or `triplet`, and `recall_at_1`: how often an image's nearest neighbour in the batch is of its class."""
    images, labels = batch
    embeddings = model(images)
    if kind not in ("info_nce", "triplet"):
        raise ValueError(f"kind is {kind!r}; use 'info_nce' or 'triplet'")
    loss = info_nce(embeddings, labels, temperature) if kind == "info_nce" else triplet(embeddings, labels, margin)
    metrics = {"loss": loss}
    if not model.training:
        similarity = (embeddings @ embeddings.T).fill_diagonal_(-torch.inf)
        metrics["recall_at_1"] = (labels[similarity.argmax(1)] == labels).float().mean()
    return metrics
