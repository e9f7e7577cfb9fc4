"""Failures whose loss is finite: the first bad value appears in backward."""

from __future__ import annotations

import math

import pytest
import torch
from forensic_cases import Case, Cases, Tiny, check
from torch import nn
from torch.utils.checkpoint import checkpoint

cases = Cases()


@cases.add("backward", "sqrt", "singular_gradient", samples=[2])
def gradient_penalty_of_a_flat_critic():
    """The gradient inside the penalty is 0 because of a ReLU: that is a value here, and masks nothing."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 1))

    def loss_fn(model, batch):
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        norm = torch.sqrt(slope.square().sum(1))  # here
        return (norm - 1).square().mean()

    batch = torch.randn(4, 3)
    batch[2] = 0.0
    return critic, loss_fn, batch


@cases.add("backward", "sqrt", "singular_gradient", module="dist", samples=[1])
def euclidean_distance_of_equal_points():
    class Dist(nn.Module):
        def forward(self, a, b):
            return ((a - b) ** 2).sum(1).sqrt()  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.dist = nn.Linear(4, 3), Dist()

        def forward(self, a, b):
            return self.dist(self.embed(a), self.embed(b))

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    b[1] = a[1]
    return Net(), lambda m, batch: m(*batch).mean(), (a, b)


@cases.add("backward", "sqrt", "singular_gradient", samples=[0])
def deviation_of_a_constant_row():
    def loss_fn(model, batch):
        return model(batch).var(1, unbiased=False).sqrt().mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(4, 4)
    x[0] = 0
    return model, loss_fn, x


@cases.add("backward", "pow", "singular_gradient", samples=[2])
def fractional_power_of_zero():
    def loss_fn(model, batch):
        return model(batch).abs().sum(1).pow(0.5).mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.rand(4, 4) + 0.1
    x[2] = 0
    return model, loss_fn, x


@cases.add("backward", "acos", "singular_gradient")
def angle_between_parallel_vectors():
    def loss_fn(model, batch):
        out = torch.tanh(100 * model(batch)[:, 0])
        return torch.acos(out).mean()  # here

    model = Tiny()
    with torch.no_grad():
        model.body.weight.fill_(1.0)
    return model, loss_fn, torch.ones(3, 4)


@cases.add("backward", "log", "masked_branch_gradient", samples=[1])
def where_hides_log_of_zero():
    def loss_fn(model, batch):
        x, y = batch
        p = model(x)[:, 0] ** 2
        logp = torch.log(p)  # here
        return torch.where(y > 0, logp, torch.zeros_like(p)).mean() + model(x).pow(2).mean()

    model = Tiny()
    with torch.no_grad():
        model.body.weight.fill_(1.0)
        model.body.bias.fill_(0.0)
    x = torch.rand(3, 4) + 0.1
    x[1] = 0
    return model, loss_fn, (x, torch.tensor([1.0, 0.0, 1.0]))


@cases.add("backward", "div", "masked_branch_gradient", samples=[2])
def mask_multiplied_after_division():
    def loss_fn(model, batch):
        x, n = batch
        out = model(x)[:, 0]
        ratio = out.abs() / (out.abs() * n)  # here
        return torch.where(n > 0, ratio, 0.0).sum() + out.mean()

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([1.0, 2.0, 0.0, 3.0]))


@cases.add("backward", "exp", "masked_branch_gradient", samples=[0])
def where_hides_exp_overflow():
    def loss_fn(model, batch):
        x, y = batch
        out = model(x)[:, 0]
        big = torch.exp(out + y)  # here
        return torch.where(y > 50, out, big).mean()

    return Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([1000.0, 0.1, 0.2]))


@cases.add("backward", "sqrt", "masked_branch_gradient", samples=[1])
def clamp_after_sqrt():
    def loss_fn(model, batch):
        x, mask = batch
        d = (model(x) * mask[:, None]).pow(2).sum(1).sqrt()  # here
        return d[mask > 0].mean()

    return Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0]))


@cases.add("backward", "eigh linalg_eigh", "degenerate_decomposition", module="spectral")
def eigenvectors_with_repeated_eigenvalues():
    class Spectral(nn.Module):
        def forward(self, a):
            _, vectors = torch.linalg.eigh(a)  # here
            return vectors

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.spectral = nn.Parameter(torch.ones(())), Spectral()

        def forward(self, a):
            return self.spectral(self.scale * a)

    return Net(), lambda m, b: (m(b) * torch.arange(9.0).reshape(3, 3)).sum(), torch.eye(3)


@cases.add("backward", "div", "custom_backward_bug", module="clip")
def custom_backward_divides_by_norm():
    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g / (g - g).norm()  # here

    class Clip(nn.Module):
        def forward(self, x):
            return Normalised.apply(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.clip = nn.Linear(4, 2), Clip()

        def forward(self, x):
            return self.clip(self.lin(x))

    return Net(), lambda m, b: m(b).mean(), torch.randn(3, 4)


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

    class Op(nn.Module):
        def forward(self, x):
            return Numeric.apply(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.op = nn.Linear(4, 2), Op()

        def forward(self, x):
            return self.op(self.lin(x))

    return Net(), lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("backward", "sqrt", "singular_gradient")
def gradient_penalty_at_zero_gradient():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    def loss_fn(model, batch):
        x = batch.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        norm = torch.sqrt(g.pow(2).sum(1))  # here
        return ((norm - 1) ** 2).mean()

    return Critic(), loss_fn, torch.randn(3, 4)


@cases.add("backward", "sqrt", "singular_gradient", module="block", samples=[0])
def inside_gradient_checkpointing():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3, bias=False)

        def forward(self, x):
            return self.lin(x).pow(2).sum(1).sqrt()  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    x = torch.randn(3, 4)
    x[0] = 0
    return Net(), lambda m, b: m(b).mean(), x


@cases.add("backward", "sqrt sqrt_", "singular_gradient", samples=[1])
def in_place_sqrt_of_a_view():
    def loss_fn(model, batch):
        out = model(batch).pow(2)
        out[:, 0].sqrt_()  # here
        return out.mean()

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@cases.add("backward", "mul", "divergence", module="cell")
def gradients_explode_through_time():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(30.0))

        def forward(self, h):
            z = h * self.w  # here
            return z + (torch.tanh(z) - z).detach()  # bounded forward, straight-through backward

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.cell = nn.Linear(4, 1), Cell()

        def forward(self, x):
            h = self.inp(x)
            for _ in range(60):
                h = self.cell(h)
            return h

    return Net(), lambda m, b: m(b).mean(), torch.randn(3, 4)


@cases.add("backward", "norm sqrt div", "singular_gradient", samples=[1])
def hypotenuse_with_rsqrt():
    def loss_fn(model, batch):
        a, b = model(batch)[:, :2].unbind(1)
        return torch.sqrt(a * a + b * b).mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@cases.add("backward", "pow", "masked_branch_gradient", samples=[2])
def missing_targets_summed_with_nansum():
    def loss_fn(model, batch):
        x, y = batch
        return torch.nansum((model(x)[:, 0] - y) ** 2)  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0.1, 0.2, math.nan, 0.3]))


@cases.add("backward", "acos", "masked_branch_gradient", samples=[2])
def where_hides_acos_beyond_one():
    def loss_fn(model, batch):
        x, cosine = batch
        angle = torch.acos(0 * model(x)[:, 0] + cosine)  # here
        return torch.where(cosine < 1, angle, torch.zeros_like(angle)).mean()

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0.1, 0.2, 1.5, 0.3]))


@cases.add("backward", "sqrt", "masked_branch_gradient", samples=[0])
def nan_to_num_after_sqrt_of_negative():
    def loss_fn(model, batch):
        x, y = batch
        root = torch.sqrt(0 * model(x)[:, 0] + y)  # here
        return torch.nan_to_num(root).mean()

    return Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([-1.0, 0.2, 0.3]))


@cases.add("backward", "log", "masked_branch_gradient", samples=[1])
def clamp_after_log():
    def loss_fn(model, batch):
        return -model(batch).pow(2).sum(1).log().clamp(min=-100).mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@cases.add("backward", "hypot", "singular_gradient", samples=[1])
def hypotenuse_of_a_zero_vector():
    def loss_fn(model, batch):
        out = model(batch)
        return torch.hypot(out[:, 0], out[:, 1]).mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@cases.add("backward", "sqrt", "singular_gradient", samples=[1])
def magnitude_of_a_silent_spectrum():
    def loss_fn(model, batch):
        z = torch.fft.rfft(model(batch))
        return torch.sqrt(z.real**2 + z.imag**2).mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@cases.add("backward", "sqrt", "singular_gradient", line=True)
def sparse_embedding_gradients():
    def loss_fn(model, batch):
        return (0 * model(batch)).pow(2).sum(1).sqrt().mean()  # here

    model = nn.Embedding(10, 4, sparse=True)
    return model, loss_fn, torch.tensor([1, 2, 3]), torch.optim.SparseAdam(model.parameters())


@cases.add("backward", "div", "custom_backward_bug", module="body")
def hook_that_divides_by_zero():
    def loss_fn(model, batch):
        out = model(batch)
        out.register_hook(lambda g: g / (g - g).sum())  # here
        return out.mean()

    return Tiny(), loss_fn, torch.randn(3, 4)


@cases.add("backward", "sqrt", "singular_gradient", module="block", samples=[0])
def inside_reentrant_checkpointing():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3, bias=False)

        def forward(self, x):
            return self.lin(x).pow(2).sum(1).sqrt()  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.block = nn.Linear(4, 4, bias=False), Block()

        def forward(self, x):
            return checkpoint(self.block, self.inp(x), use_reentrant=True)

    x = torch.randn(3, 4)
    x[0] = 0
    return Net(), lambda m, b: m(b).mean(), x


@cases.add("backward", "sqrt", "singular_gradient", samples=[1])
def through_vmap_and_functional_call():
    def loss_fn(model, batch):
        weights = dict(model.named_parameters())

        def one(x):
            return torch.func.functional_call(model, weights, (x,)).pow(2).sum().sqrt()  # here

        return torch.func.vmap(one)(batch).mean()

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@pytest.mark.parametrize("case", cases, ids=lambda case: case.id)
def test_backward(case: Case) -> None:
    check(case)
