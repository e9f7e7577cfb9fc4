"""A small residual network that classifies images. Run it with `safetrain fit image`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(channels_out)
    )


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection, projected if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(channels_in, channels_out, stride)
        self.second = conv_norm(channels_out, channels_out)
        same = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    """Images [batch, channels, height, width] to logits. Every stage after the first halves height and width."""

    def __init__(
        self, num_classes: int = 10, channels: int = 1, width: int = 16, stages: int = 2, blocks_per_stage: int = 1
    ) -> None:
        super().__init__()
        self.stem = conv_norm(channels, width)
        widths = [width * 2**stage for stage in range(stages)]
        blocks, before = [], width
        for stage, after in enumerate(widths):
            for block in range(blocks_per_stage):
                blocks.append(ResidualBlock(before, after, stride=2 if stage > 0 and block == 0 else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(F.relu(self.stem(images)))
        return self.head(features.mean((2, 3)))


def classification_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor], label_smoothing: float = 0.0
) -> dict[str, Tensor]:
    images, labels = batch
    logits = model(images).float()
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}
