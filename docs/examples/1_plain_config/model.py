import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


def samples(count: int, seed: int) -> TensorDataset:
    """Points of three overlapping clouds."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 8, generator=generator) + labels[:, None], labels)
