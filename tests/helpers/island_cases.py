"""A model whose parts can be float32 islands."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc(self.norm(x))


class Net(nn.Module):
    """With gradient checkpointing of its blocks, reentrant or not, if `reentrant` is given."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))
