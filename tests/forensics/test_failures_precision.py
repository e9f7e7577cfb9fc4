"""Failures that only half precision has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Case, Cases, Tiny, check
from torch import nn

from safetrain.forensics import investigate
from safetrain.precision.islands import islands_of

cases = Cases()


@cases.add("forward", "matmul bmm mm", "fp16_overflow", module="attn", precision="fp16", samples=[1])
def attention_scores_without_scaling():
    class Attn(nn.Module):
        def forward(self, q, k):
            return (q @ k.transpose(1, 2)).softmax(-1)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.attn = nn.Linear(8, 8), Attn()

        def forward(self, x):
            return self.attn(self.q(x), x)

    x = torch.randn(3, 5, 8)
    x[1] *= 2000
    return Net(), lambda m, b: m(b).float()[:, :, 0].mean(), x


@cases.add("forward", "div", "fp16_underflow")
def eps_that_vanishes_in_half():
    def loss_fn(model, batch):
        out = model(batch)
        return (out / (out.pow(2).sum(1, keepdim=True) + 1e-8)).float().mean()  # here

    model = Tiny().half()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4).half()
    x[1] = 0
    return model, loss_fn, x


@cases.add("forward", "log", "fp16_underflow", samples=[0])
def log_eps_that_vanishes_in_half():
    def loss_fn(model, batch):
        p = model(batch).softmax(1)
        return -torch.log(p + 1e-9).float()[:, 0].mean()  # here

    model = Tiny().half()
    x = torch.randn(3, 4).half()
    with torch.no_grad():
        x[0] = 1000 * (model.body.weight[1] - model.body.weight[0])
    return model, loss_fn, x


@cases.add("forward", "pow", "fp16_overflow", precision="fp16", samples=[2])
def square_of_half_activations():
    def loss_fn(model, batch):
        return model(batch).pow(2).float().mean()  # here

    x = torch.randn(4, 4)
    x[2] *= 5000
    return Tiny(), loss_fn, x


@cases.add("forward", "exp", "fp16_overflow", samples=[1])
def exp_in_half():
    def loss_fn(model, batch):
        return torch.exp(model(batch)).float().mean()  # here

    model = Tiny().half()
    with torch.no_grad():
        model.body.weight.fill_(1.0)
    x = 0.1 * torch.randn(3, 4).half()
    x[1] = 5
    return model, loss_fn, x


@cases.add("forward", "sum", "fp16_overflow", module="pool", samples=[0])
def sum_pooling_in_half():
    class Pool(nn.Module):
        def forward(self, x):
            return x.sum((1, 2))  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.pool = nn.Linear(4, 4), Pool()

        def forward(self, x):
            return self.pool(self.lin(x).abs())

    x = torch.randn(3, 64, 4).half()
    x[0] *= 3000
    return Net().half(), lambda m, b: m(b).float().log().mean(), x


@cases.add("backward", "to_copy to float", "fp16_overflow")
def loss_scale_too_high():
    def loss_fn(model, batch):
        x, y = batch
        return F.mse_loss(model(x).float(), y) * 2.0**20  # here

    return Tiny().half(), loss_fn, (torch.randn(4, 4).half(), torch.full((4, 3), 9.0))


@pytest.mark.parametrize("case", cases, ids=lambda case: case.id)
def test_precision(case: Case) -> None:
    check(case)


def test_the_remedy_that_is_tried_is_the_island_that_is_installed() -> None:
    seen: list[list[str]] = []

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(islands_of(model))
        return model(batch).float().mean()

    model = nn.Sequential(nn.Linear(4, 4), Watched())
    nn.init.constant_(model[0].weight, 300.0)
    incident = investigate(model, loss_fn, torch.ones(3, 4), precision="fp16")
    assert incident is not None
    tried = {remedy.detail for remedy in incident.remedies if remedy.name == "fp32_island"}
    assert tried
    assert {f"with {name} kept in fp32" for names in seen for name in names} == tried
    assert islands_of(model) == []
