"""Steps that contain NaN or Inf and are healthy: intended, absorbed or never used. None may be reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Tiny, without_bias
from torch import nn

from safetrain.forensics import investigate

controls: list[Callable[[], tuple[Any, ...]]] = []


def control(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    """The function returns model, loss function and batch, and perhaps the optimizer."""
    controls.append(build)
    return build


def control_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function is the loss of a `Tiny` and a batch of 3 samples."""

    def build() -> tuple[Any, ...]:
        return Tiny(), loss_fn, torch.randn(3, 4)

    build.__name__ = loss_fn.__name__
    controls.append(build)
    return loss_fn


@control_loss
def nan_output_that_is_not_used(model, batch):
    out = model(batch)
    return {"loss": out.pow(2).mean(), "ratio": out / (out - out)}


@control_loss
def detached_metric_is_nan(model, batch):
    out = model(batch)
    with torch.no_grad():
        correlation = (out - out).mean() / (out - out).std()
    return {"loss": out.pow(2).mean(), "correlation": correlation}


@control_loss
def missing_targets_selected_away_first(model, batch):
    y = torch.tensor([0.1, math.nan, 0.3])
    ok = ~y.isnan()
    return F.mse_loss(model(batch)[ok, 0], y[ok])


@control_loss
def min_of_distances_starts_at_inf(model, batch):
    best = torch.full((3,), math.inf)
    for centre in model(batch).unbind(0):
        best = torch.minimum(best, (centre - batch[:, :3]).pow(2).sum(1))
    return best.mean()


@control_loss
def sentinel_that_is_overwritten(model, batch):
    out = torch.full((3, 3), math.nan)
    out[:] = model(batch)
    return out.pow(2).mean()


@control_loss
def bce_at_saturation_with_the_built_in_loss(model, batch):
    return F.binary_cross_entropy(torch.sigmoid(1e4 * model(batch)[:, 0]), torch.tensor([0.0, 1.0, 0.0]))


@control_loss
def cosine_similarity_of_zero_vectors(model, batch):
    return F.cosine_similarity(model(batch), torch.zeros(3, 3)).mean()


@control_loss
def huge_but_finite(model, batch):
    return 1e15 * model(batch).pow(2).mean()


@control_loss
def empty_memory_that_is_filled(model, batch):
    out = torch.empty(3, 3)
    torch.add(model(batch).detach(), 1.0, out=out)
    return (model(batch) * out).mean()


@control
def causal_mask_of_minus_inf():
    def loss_fn(model, x):
        return ((model(x) @ x.transpose(1, 2) + model.mask).softmax(-1) @ x).pow(2).mean()

    model = Tiny(4, 4)
    model.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))
    return model, loss_fn, torch.randn(2, 5, 4)


@control
def scaled_dot_product_attention_with_a_dead_row():
    def loss_fn(model, batch):
        q = model(batch)
        mask = torch.zeros(3, 3, dtype=torch.bool)
        mask[0] = True
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).mean()

    return Tiny(4, 4), loss_fn, torch.randn(2, 3, 4)


@control
def nan_to_num_of_data_that_has_no_gradient():
    x = torch.randn(4, 4)
    x[1] = math.nan
    return Tiny(), lambda m, b: m(torch.nan_to_num(b)).pow(2).mean(), x


@control
def relu_absorbs_the_infinite_derivative():
    model = without_bias(Tiny(), weight=1.0)
    nn.init.constant_(model.body.bias, -100.0)
    return model, lambda m, b: F.relu(m(b)).sum(1).pow(0.5).mean() + m(b).mean(), torch.rand(3, 4)


@control
def observer_buffers_start_infinite():
    class Net(Tiny):
        def forward(self, x):
            out = self.body(x)
            with torch.no_grad():
                self.low.copy_(torch.minimum(self.low, out.min()))
            return out

    model = Net()
    model.register_buffer("low", torch.tensor(math.inf))
    model.register_buffer("unused", torch.tensor(math.nan))
    return model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4)


@control
def metric_buffer_turns_infinite():
    class Meter(nn.Module):
        @torch.no_grad()
        def forward(self, value):
            self.total.add_(value)

    def loss_fn(model, batch):
        loss = model(batch).pow(2).mean()
        model.meter(torch.exp(loss.detach() + 1000))
        return loss

    model = Tiny()
    model.meter = Meter()
    model.meter.register_buffer("total", torch.zeros(()))
    return model, loss_fn, torch.randn(3, 4)


@control
def running_metric_of_the_root_module_turns_infinite():
    class Net(Tiny):
        def forward(self, x):
            out = self.body(x)
            with torch.no_grad():
                self.perplexity.mul_(0.9).add_(torch.exp(1000 + out.sum()))
            return out

    model = Net()
    model.register_buffer("perplexity", torch.ones(()))
    return model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4)


class Tempered(Tiny):
    """Its temperature is at 0, where the derivative of the root is infinite."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.body(x) + torch.sqrt(self.temperature)


@control
def gradient_of_a_parameter_that_nobody_optimizes():
    model = Tempered()
    return model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4), torch.optim.SGD(model.body.parameters(), lr=0.1)


@control
def infinite_gradient_that_a_hook_clips():
    model = Tempered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1.0))
    return model, lambda m, b: m(b).sum(), torch.randn(3, 4), optimizer


@control
def optimizer_that_skips_bad_gradients():
    class Careful(torch.optim.SGD):
        def step(self, closure=None):
            if all(p.grad.isfinite().all() for p in self.param_groups[0]["params"]):
                super().step(closure)

    model = Tiny().half()
    return model, lambda m, b: m(b).float().mean() * 1e9, torch.randn(3, 4).half(), Careful(model.parameters(), lr=0.1)


@control
def norm_at_zero():
    return without_bias(Tiny()), lambda m, b: m(b).norm(dim=1).mean(), torch.zeros(3, 4)


@control
def embedding_row_of_nan_that_is_not_looked_up():
    table = nn.Embedding(4, 3)
    with torch.no_grad():
        table.weight[2] = math.nan
    return table, lambda m, b: m(b).pow(2).mean(), torch.tensor([0, 1, 3])


@pytest.mark.parametrize("build", controls, ids=lambda build: build.__name__)
def test_control(build: Callable[[], tuple[Any, ...]]) -> None:
    model, loss_fn, batch, *rest = build()
    optimizer = rest[0] if rest else torch.optim.Adam(model.parameters(), lr=1e-3)
    incident = investigate(model, loss_fn, batch, optimizer=optimizer)
    assert incident is None, incident.render()
    if not rest:
        assert investigate(model, loss_fn, batch) is None
