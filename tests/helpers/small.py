"""Small models, data with faults in known places, and a comparison of whole states."""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

fused_adamw = partial(torch.optim.AdamW, fused=True)


def make_model(dropout=0.1, norm=True):
    layers = [
        nn.Linear(6, 16),
        nn.BatchNorm1d(16) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 1),
    ]
    return nn.Sequential(*layers)


def make_batches(count, bad=(), value=float("nan"), size=8):
    batches = [(torch.randn(size, 6), torch.randn(size, 1)) for _ in range(count)]
    for index in bad:
        batches[index][0].fill_(value)  # every sample: leaving some out cannot repair it
    return batches


def with_bad_samples(batches, *places):
    """`places` are pairs of a batch and its sample."""
    for index, sample in places:
        batches[index][0][sample] = float("nan")
    return batches


def mse(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


class Scaled(nn.Module):
    """Computes what the inner layer computes, by way of numbers that half precision cannot hold."""

    def __init__(self, inner, factor=1e6):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x):
        return (self.inner(x) * self.factor) / self.factor


def float_mse(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def deep_state(trainer):
    """Everything that a refused step must leave bit-identical."""
    scaler = trainer.precision._scaler
    return copy.deepcopy(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
            "scaler": scaler.state_dict() if scaler and scaler._scale is not None else None,
            "ema": trainer.ema.state_dict() if trainer.ema else None,
            "modes": [m.training for m in trainer.model.modules()],
        }
    )


def assert_same(left, right, path="state"):
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right) or (
            (left.isnan() == right.isnan()).all() and torch.equal(left.nan_to_num(), right.nan_to_num())
        ), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    else:
        assert left == right or (left != left and right != right), path  # NaN equals NaN
