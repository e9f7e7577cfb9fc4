"""A run with three different incidents: division by zero, the logarithm of zero, and NaN in the data."""

import torch
from torch import nn

from safetrain import SafeTrainer


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x, mask):
        hidden = torch.tanh(self.body(x))
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return self.head(pooled)


def loss_fn(model, batch):
    x, mask, y = batch
    error = (model(x, mask) - y) ** 2
    return error.mean() + 1e-3 * torch.log(y).mean()


def batches(count):
    made = [(torch.randn(8, 4, 6), torch.ones(8, 4, 1), torch.rand(8, 1) + 0.5) for _ in range(count)]
    made[10][1][3] = 0
    made[20][2][5] = 0
    made[30][0][2, 1, 0] = float("nan")
    return made


INCIDENTS = {10: "division_by_zero", 20: "log_of_nonpositive", 30: "bad_input_data"}


def faulty_run(directory, **logging):
    torch.manual_seed(0)
    config = {
        "name": "three",
        "seed": 0,
        "loop": {"log_every": 1},
        "logging": {"console": "off", "histograms_every": 20, **logging},
    }
    return SafeTrainer(Pooling(), loss_fn=loss_fn, train_data=batches(40), config=config, run_dir=directory).fit()
