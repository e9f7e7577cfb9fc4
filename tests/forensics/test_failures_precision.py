"""Failures that only half precision has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Case, Cases, chain, check, incident_of
from torch import nn

from safetrain.precision.islands import islands_of

cases = Cases()
FP16 = {"precision": "fp16"}


@cases.loss("forward", "div", "fp16_underflow", rows=3, silent=1, half=True)
def eps_that_vanishes_in_half(model, batch):
    out = model(batch)
    return (out / (out.pow(2).sum(1, keepdim=True) + 1e-8)).float().mean()  # here


@cases.loss("forward", "pow", "fp16_overflow", scale={2: 5000}, options=FP16, samples=[2])
def square_of_half_activations(model, batch):
    return model(batch).pow(2).float().mean()  # here


@cases.loss("backward", "to_copy to float", "fp16_overflow", torch.full((4, 3), 9.0), half=True)
def loss_scale_too_high(model, x, y):
    return F.mse_loss(model(x).float(), y) * 2.0**20  # here


@cases.loss("forward", "log", "fp16_underflow", rows=3, scale={0: 1000}, half=True, samples=[0])
def log_eps_that_vanishes_in_half(model, batch):
    p = model(batch).softmax(1)
    return -torch.log(p + 1e-9).float().mean()  # here


@cases.loss("forward", "exp", "fp16_overflow", rows=3, scale={1: 40}, half=True, samples=[1])
def exp_in_half(model, batch):
    return torch.exp(model(batch).abs()).float().mean()  # here


@cases.add("forward", "matmul bmm mm", "fp16_overflow", module="attn", options=FP16, samples=[1])
def attention_scores_without_scaling():
    def loss_fn(model, x):
        return model.attn(model.q(x), x).float()[:, :, 0].mean()

    x = torch.randn(3, 5, 8)
    x[1] *= 2000
    return chain(q=nn.Linear(8, 8), attn=lambda q, k: (q @ k.transpose(1, 2)).softmax(-1)), loss_fn, x  # here


@cases.add("forward", "sum", "fp16_overflow", module="pool", samples=[0])
def sum_pooling_in_half():
    model = chain(lin=nn.Linear(4, 4), magnitude=torch.abs, pool=lambda x: x.sum((1, 2)))  # here
    x = torch.randn(3, 64, 4).half()
    x[0] *= 3000
    return model.half(), lambda m, b: m(b).float().log().mean(), x


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
    incident = incident_of(model, loss_fn, torch.ones(3, 4), precision="fp16")
    tried = {remedy.detail for remedy in incident.remedies if remedy.name == "fp32_island"}
    assert tried
    assert {f"with {name} kept in fp32" for names in seen for name in names} == tried
    assert islands_of(model) == []
