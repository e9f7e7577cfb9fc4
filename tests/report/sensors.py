"""Synthetic sensor readings with known faults."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Readings(Dataset):
    def __init__(self, count: int = 4096) -> None:
        generator = torch.Generator().manual_seed(1)
        self.signal = torch.randn(count, 16, generator=generator)
        self.target = self.signal[:, :4].tanh() + 0.05 * torch.randn(count, 4, generator=generator)
        self.weights = torch.rand(count, 4, generator=generator)
        if count > 4000:
            self.weights[1000] = 0.0  # the weights of a sample are all 0
            self.signal[1777] = 0.0  # a silent sensor
            self.target[2500, 2] = float("nan")  # a lost label
            self.signal[3000:3072] *= 3e18  # saturated

    def __len__(self) -> int:
        return len(self.signal)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"signal": self.signal[index], "target": self.target[index], "weights": self.weights[index]}


class Loudness(nn.Module):
    """Appends the level of each signal in decibels."""

    def forward(self, signal: Tensor) -> Tensor:
        power = signal.square().mean(-1, keepdim=True)
        level = 10 * torch.log10(power)
        return torch.cat([signal, level / 10], dim=-1)


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.loudness = Loudness()
        self.encoder = nn.Sequential(nn.Linear(17, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 4)

    def forward(self, signal: Tensor) -> Tensor:
        return self.head(self.encoder(self.loudness(signal)))


def weighted_error(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    error = (model(batch["signal"]) - batch["target"]).square()
    weights = batch["weights"]
    per_sensor = (error * weights).sum(1) / weights.sum(1)
    return {"loss": per_sensor.mean()}
