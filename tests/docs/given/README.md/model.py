import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)
