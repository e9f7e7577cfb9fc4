"""Failures of what lasts: data, parameters, buffers, and the optimizer's update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Case, Cases, Tiny, chain, check
from torch import nn

cases = Cases()


class Updated(torch.optim.Optimizer):
    """An optimizer that somebody wrote for their own work: `update` changes a parameter by its gradient."""

    def __init__(self, model, update):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad)


@cases.add("data", "data input", "bad_input_data", module="<data>", samples=[2], line=False)
def infinite_feature_in_a_nested_batch():
    x = torch.randn(4, 4)
    x[2, 0] = math.inf
    return Tiny(), lambda m, b: m(b["inputs"]["x"]).pow(2).mean(), {"inputs": {"x": x}, "names": ["a", "b", "c", "d"]}


@cases.add("data", "data input", "bad_input_data", module="<data>", samples=[0, 3], line=False)
def nan_in_a_dataclass_batch():
    @dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor

    x = torch.randn(6, 4)
    x[0, 1] = x[3, 2] = math.nan
    return Tiny(), lambda m, b: F.mse_loss(m(b.x), b.y), Batch(x, torch.randn(6, 3))


@cases.add("data", "data input", "bad_input_data", module="<data>", samples=[1], line=False)
def log_spectrogram_with_silence():
    x = torch.randn(4, 4)
    x[1, 2] = -math.inf
    return Tiny(), lambda m, b: m(b).pow(2).mean(), x


@cases.add("params", "parameter weight", "corrupt_parameter", module="body", line=False)
def weight_that_was_never_initialised():
    model = Tiny()
    with torch.no_grad():
        model.body.weight[1, 2] = math.nan
    return model, lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("params", "buffer scale", "corrupt_parameter", module="", line=False)
def infinite_scale_buffer():
    class Net(Tiny):
        def forward(self, x):
            return self.body(x) * self.scale

    model = Net()
    model.register_buffer("scale", torch.tensor([1.0, math.inf, 1.0]))
    return model, lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("params", "parameter weight", "corrupt_parameter", module="table", samples=[], line=False)
def embedding_row_of_nan():
    model = chain(table=nn.Embedding(5, 4), head=nn.Linear(4, 2))
    with torch.no_grad():
        model.table.weight[3] = math.nan
    return model, lambda m, b: m(b).mean(), torch.tensor([0, 3, 1])


@cases.add("optimizer", "step addcdiv addcdiv_ div", "fp16_underflow", module="body", line=False)
def adam_eps_in_half():
    model = Tiny().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, lambda m, b: (m(b).float() * 1e-6).mean(), torch.randn(3, 4).half(), optimizer


@cases.add("optimizer", "step add_ add mul_ addcdiv_", "optimizer_numerics", module="body", line=False)
def schedule_that_gives_nan():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = math.nan
    return model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4), optimizer


@cases.add("optimizer", "sqrt sqrt_ div", "optimizer_numerics", module="body")
def negative_variance_in_a_custom_optimizer():
    def update(p, g):
        variance = g * g - (1.0001 * g) ** 2
        p.sub_(0.1 * g / variance.sqrt())  # here

    model = Tiny()
    return model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4), Updated(model, update)


@cases.add("forward", "div", "division_by_zero", module="codebook")
def ema_codebook_with_a_dead_code():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.tensor([[0.0, 0.0], [1e3, 1e3]]))

        def forward(self, z):
            nearest = torch.cdist(z, self.codes).argmin(1)
            chosen = self.codes[nearest]
            with torch.no_grad():
                one_hot = F.one_hot(nearest, 2).float()
                self.codes.copy_(one_hot.T @ z / one_hot.sum(0)[:, None])  # here
            return z + (chosen - z).detach(), (z - chosen).pow(2).mean()

    def loss_fn(model, batch):
        z, commit = model(batch)
        return z.pow(2).mean() + commit

    return chain(enc=nn.Linear(4, 2), codebook=Codebook()), loss_fn, torch.randn(3, 4)


@cases.add("data", "data input", "bad_input_data", module="<data>", samples=[2])
def nan_in_a_numpy_batch():
    x = torch.randn(4, 4).numpy()
    x[2, 1] = math.nan

    def loss_fn(model, batch):
        return model(torch.from_numpy(batch["x"])).mean()  # here

    return Tiny(), loss_fn, {"x": x}


@cases.add("params", "attribute table", "corrupt_parameter", module="scale")
def tensor_that_a_module_holds():
    class Scale(nn.Module):
        def forward(self, x):
            return x * self.table  # here

    model = chain(body=Tiny(), scale=Scale())
    model.scale.table = torch.tensor([1.0, math.nan, 1.0])
    return model, lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("params", "tensor weight", "corrupt_parameter", line=False)
def class_weights_of_a_criterion():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, math.nan, 1.0]))
    return Tiny(), lambda m, b: criterion(m(b), torch.tensor([0, 1, 2])), torch.randn(3, 4)


@cases.add("forward", "batch_norm native_batch_norm", "divergence", module="norm")
def batch_norm_statistics_overflow_beside_the_loss():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

        def forward(self, x):
            h = self.lin(x)
            z = self.norm(h)  # here
            return self.head(torch.where(z.isfinite(), z, torch.zeros_like(z)).detach() + h)

    return Net(), lambda m, b: m(b).mean(), 1e25 * torch.randn(6, 4)


@cases.add("optimizer", "step sqrt sqrt_", "optimizer_numerics", module="body", line=False)
def centred_rmsprop_with_negative_variance():
    model = Tiny()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["grad_avg"].fill_(5.0)
        state["square_avg"].fill_(1.0)
    return model, lambda m, b: m(b).sum(), torch.randn(3, 4), optimizer


@cases.add("optimizer", "step addcdiv addcdiv_ foreach_addcdiv", "optimizer_numerics", module="body", line=False)
def adam_without_eps_and_a_zero_gradient():
    model = Tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.0, foreach=True)
    return model, lambda m, b: 0 * m(b).sum(), torch.randn(3, 4), optimizer


@cases.add("optimizer", "div", "optimizer_numerics", module="body")
def trust_ratio_of_a_zero_update():
    def update(p, g):
        trust = p.norm() / g.norm()  # here
        p.sub_(0.1 * trust * g)

    model = Tiny()
    return model, lambda m, b: 0 * m(b).sum(), torch.randn(3, 4), Updated(model, update)


@pytest.mark.parametrize("case", cases, ids=lambda case: case.id)
def test_state(case: Case) -> None:
    check(case)
