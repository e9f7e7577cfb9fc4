"""Failures whose loss is finite: the first bad value appears in backward, of the loss's own operations, then of modules."""

from __future__ import annotations

import math

import pytest
import torch
from forensic_cases import Case, Cases, Tiny, chain, check, without_bias
from torch import nn
from torch.utils.checkpoint import checkpoint

cases = Cases()


@cases.loss("backward", "sqrt", "singular_gradient", silent=0, samples=[0])
def deviation_of_a_constant_row(model, batch):
    return model(batch).var(1, unbiased=False).sqrt().mean()  # here


@cases.loss("backward", "pow", "singular_gradient", silent=2, samples=[2])
def fractional_power_of_zero(model, batch):
    return model(batch).abs().sum(1).pow(0.5).mean()  # here


@cases.loss("backward", "div", "masked_branch_gradient", [1.0, 2.0, 0.0, 3.0], samples=[2])
def mask_multiplied_after_division(model, x, n):
    out = model(x)[:, 0]
    ratio = out.abs() / (out.abs() * n)  # here
    return torch.where(n > 0, ratio, 0.0).sum() + out.mean()


@cases.loss("backward", "exp", "masked_branch_gradient", [1000.0, 0.1, 0.2], rows=3, samples=[0])
def where_hides_exp_overflow(model, x, y):
    out = model(x)[:, 0]
    big = torch.exp(out + y)  # here
    return torch.where(y > 50, out, big).mean()


@cases.loss("backward", "sqrt", "masked_branch_gradient", rows=3, silent=1, samples=[1])
def where_hides_nan_in_forward_but_not_in_backward(model, batch):
    x = model(batch) ** 2
    root = torch.sqrt(x)  # here
    return torch.where(x > 0, root, torch.zeros_like(x)).mean()


@cases.loss("backward", "sqrt", "masked_branch_gradient", [1.0, 0.0, 1.0], rows=3, samples=[1])
def clamp_after_sqrt(model, x, mask):
    d = (model(x) * mask[:, None]).pow(2).sum(1).sqrt()  # here
    return d[mask > 0].mean()


@cases.loss("backward", "sqrt", "singular_gradient", rows=3, silent=0)
def clipping_before_backward_does_nothing(model, batch):
    loss = model(batch).pow(2).sum(1).sqrt().mean()  # here
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


@cases.loss("backward", "sqrt sqrt_", "singular_gradient", rows=3, silent=1, samples=[1])
def in_place_sqrt_of_a_view(model, batch):
    out = model(batch).pow(2)
    out[:, 0].sqrt_()  # here
    return out.mean()


@cases.loss("backward", "norm sqrt div", "singular_gradient", rows=3, silent=1, samples=[1])
def hypotenuse_with_rsqrt(model, batch):
    a, b = model(batch)[:, :2].unbind(1)
    return torch.sqrt(a * a + b * b).mean()  # here


@cases.loss("backward", "pow", "masked_branch_gradient", [0.1, 0.2, math.nan, 0.3], samples=[2])
def missing_targets_summed_with_nansum(model, x, y):
    return torch.nansum((model(x)[:, 0] - y) ** 2)  # here


@cases.loss("backward", "acos", "masked_branch_gradient", [0.1, 0.2, 1.5, 0.3], samples=[2])
def where_hides_acos_beyond_one(model, x, cosine):
    angle = torch.acos(0 * model(x)[:, 0] + cosine)  # here
    return torch.where(cosine < 1, angle, torch.zeros_like(angle)).mean()


@cases.loss("backward", "sqrt", "masked_branch_gradient", [-1.0, 0.2, 0.3], rows=3, samples=[0])
def nan_to_num_after_sqrt_of_negative(model, x, y):
    root = torch.sqrt(0 * model(x)[:, 0] + y)  # here
    return torch.nan_to_num(root).mean()


@cases.loss("backward", "log", "masked_branch_gradient", rows=3, silent=1, samples=[1])
def clamp_after_log(model, batch):
    return -model(batch).pow(2).sum(1).log().clamp(min=-100).mean()  # here


@cases.loss("backward", "hypot", "singular_gradient", rows=3, silent=1, samples=[1])
def hypotenuse_of_a_zero_vector(model, batch):
    out = model(batch)
    return torch.hypot(out[:, 0], out[:, 1]).mean()  # here


@cases.loss("backward", "sqrt", "singular_gradient", rows=3, silent=1, samples=[1])
def magnitude_of_a_silent_spectrum(model, batch):
    z = torch.fft.rfft(model(batch))
    return torch.sqrt(z.real**2 + z.imag**2).mean()  # here


@cases.loss("backward", "div", "custom_backward_bug", rows=3, module="body")
def hook_that_divides_by_zero(model, batch):
    out = model(batch)
    out.register_hook(lambda g: g / (g - g).sum())  # here
    return out.mean()


@cases.loss("backward", "sqrt", "singular_gradient", rows=3, silent=1, samples=[1])
def through_vmap_and_functional_call(model, batch):
    weights = dict(model.named_parameters())

    def one(x):
        return torch.func.functional_call(model, weights, (x,)).pow(2).sum().sqrt()  # here

    return torch.func.vmap(one)(batch).mean()


def gradient_penalty(model, batch):
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    norm = torch.sqrt(slope.square().sum(1))  # here
    return (norm - 1).square().mean()


@cases.add("backward", "sqrt", "singular_gradient", samples=[2])
def gradient_penalty_of_a_flat_critic():
    """The gradient inside the penalty is 0 because of a ReLU: that is a value here, and masks nothing."""
    critic = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 1))
    batch = torch.randn(4, 3)
    batch[2] = 0.0
    return critic, gradient_penalty, batch


@cases.add("backward", "sqrt", "singular_gradient")
def gradient_penalty_at_zero_gradient():
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.zeros_(critic[2].weight)
    return critic, gradient_penalty, torch.randn(3, 4)


@cases.add("backward", "sqrt", "singular_gradient", module="dist", samples=[1])
def euclidean_distance_of_equal_points():
    model = chain(embed=nn.Linear(4, 3), dist=lambda ab: ((ab[0] - ab[1]) ** 2).sum(1).sqrt())  # here
    pairs = torch.randn(2, 4, 4)
    pairs[1, 1] = pairs[0, 1]
    return model, lambda m, batch: m(torch.stack(batch)).mean(), pairs.unbind()


@cases.loss("backward", "acos", "singular_gradient", rows=3)
def angle_between_parallel_vectors(model, batch):
    out = torch.tanh(1e4 * model(batch)[:, 0].abs())
    return torch.acos(out).mean()  # here


@cases.loss("backward", "log", "masked_branch_gradient", [1.0, 0.0, 1.0], rows=3, silent=1, samples=[1])
def where_hides_log_of_zero(model, x, y):
    p = model(x)[:, 0] ** 2
    logp = torch.log(p)  # here
    return torch.where(y > 0, logp, torch.zeros_like(p)).mean() + model(x).pow(2).mean()


@cases.add("backward", "eigh linalg_eigh", "degenerate_decomposition", module="spectral")
def eigenvectors_with_repeated_eigenvalues():
    linear = nn.Linear(3, 3, bias=False)
    nn.init.eye_(linear.weight)
    model = chain(scale=linear, spectral=lambda a: torch.linalg.eigh(a)[1])  # here
    return model, lambda m, b: (m(b) * torch.arange(9.0).reshape(3, 3)).sum(), torch.eye(3)


@cases.add("backward", "div", "custom_backward_bug", module="clip")
def custom_backward_divides_by_norm():
    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g / (g - g).norm()  # here

    return chain(lin=nn.Linear(4, 2), clip=Normalised.apply), lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("backward", "Numeric NumericBackward", "custom_backward_bug", module="op", line=False)
def custom_backward_in_numpy():
    class Numeric(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            values = g.numpy().copy()
            values[0] = math.nan
            return torch.from_numpy(values)

    return chain(lin=nn.Linear(4, 2), op=Numeric.apply), lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("backward", "mul", "divergence", module="cell")
def gradients_explode_through_time():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(30.0))

        def forward(self, h):
            z = h * self.w  # here
            return z + (torch.tanh(z) - z).detach()  # bounded forward, straight-through backward

    def loss_fn(model, batch):
        h = model.inp(batch)
        for _ in range(60):
            h = model.cell(h)
        return h.mean()

    return chain(inp=nn.Linear(4, 1), cell=Cell()), loss_fn, torch.randn(3, 4)


@cases.add("backward", "sqrt", "singular_gradient")
def sparse_embedding_gradients():
    def loss_fn(model, batch):
        return (0 * model(batch)).pow(2).sum(1).sqrt().mean()  # here

    model = nn.Embedding(10, 4, sparse=True)
    return model, loss_fn, torch.tensor([1, 2, 3]), torch.optim.SparseAdam(model.parameters())


def checkpointed(use_reentrant):
    class Block(Tiny):
        def forward(self, x):
            return self.body(x).pow(2).sum(1).sqrt()  # here

    def loss_fn(model, batch):
        return checkpoint(model.block, model.inp(batch), use_reentrant=use_reentrant).mean()

    x = torch.randn(3, 4)
    x[0] = 0
    return chain(inp=nn.Linear(4, 4, bias=False), block=without_bias(Block())), loss_fn, x


@cases.add("backward", "sqrt", "singular_gradient", module="block", samples=[0])
def inside_gradient_checkpointing():
    return checkpointed(use_reentrant=False)


@cases.add("backward", "sqrt", "singular_gradient", module="block", samples=[0])
def inside_reentrant_checkpointing():
    return checkpointed(use_reentrant=True)


@pytest.mark.parametrize("case", cases, ids=lambda case: case.id)
def test_backward(case: Case) -> None:
    check(case)
