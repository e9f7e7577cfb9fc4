"""Failures whose first bad value appears in the forward pass."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Case, Cases, Tiny, check
from torch import nn
from torch.distributions import Beta, Dirichlet, LogNormal, Normal

cases = Cases()


@cases.add("forward", "log", "log_of_nonpositive", samples=[1])
def kl_by_hand_with_a_zero_probability():
    target = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.4, 0.6], [0.1, 0.1, 0.8]])

    def loss_fn(model, batch):
        x, q = batch
        log_q = torch.log(q)  # here
        return (q * (log_q - model(x).log_softmax(1))).sum(1).mean()

    return Tiny(), loss_fn, (torch.randn(3, 4), target)


@cases.add("forward", "log", "log_of_nonpositive", samples=[2])
def focal_loss_of_saturated_probability():
    def loss_fn(model, batch):
        x, y = batch
        p = torch.sigmoid(model(x)[:, 0])
        return -((1 - p) ** 2 * y * torch.log(p) + p**2 * (1 - y) * torch.log(1 - p)).mean()  # here

    model = Tiny()
    x = torch.randn(5, 4)
    with torch.no_grad():
        x[2] = 200 * model.body.weight[0].sign() / model.body.weight[0].abs()
    return model, loss_fn, (x, torch.tensor([1.0, 0, 0, 1, 0]))


@cases.add("forward", "log1p", "log_of_nonpositive", samples=[0])
def log1p_of_minus_one():
    def loss_fn(model, batch):
        x, returns = batch
        return (model(x)[:, 0] - torch.log1p(returns)).pow(2).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([-1.0, 0.2, 0.1, 0.3]))


@cases.add("forward", "xlogy", "log_of_nonpositive", samples=[1])
def xlogy_of_positive_times_log_zero():
    def loss_fn(model, batch):
        x, p, q = batch
        return torch.special.xlogy(p, q).mean() + model(x).mean()  # here

    return Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.5]))


@cases.add("forward", "erfinv", "invalid_domain", samples=[2])
def inverse_normal_of_a_quantile_of_one():
    def loss_fn(model, batch):
        x, u = batch
        z = torch.erfinv(2 * u - 1)  # here
        return (model(x)[:, 0] - z).pow(2).mean()

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0.5, 0.4, 1.0, 0.3]))


@cases.add("forward", "pow", "invalid_domain", module="curve")
def gamma_curve_of_negative_pixels():
    class Curve(nn.Module):
        def forward(self, x):
            return x ** (1 / 2.2)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.curve = nn.Conv2d(3, 3, 1), Curve()

        def forward(self, x):
            return self.curve(self.conv(x))

    return Net(), lambda m, b: m(b).mean(), torch.randn(4, 3, 4, 4)


@cases.add("forward", "acosh", "invalid_domain", samples=[3])
def hyperbolic_distance_below_one():
    def loss_fn(model, batch):
        x, d = batch
        return (model(x)[:, 0] + torch.acosh(d)).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([1.5, 2.0, 1.1, 0.99]))


@cases.add("forward", "sqrt", "invalid_domain", samples=[1])
def negative_variance_by_cancellation():
    def loss_fn(model, batch):
        x, y = batch
        var = (y**2).mean(1) - y.mean(1) ** 2 - 1e-3
        return (model(x)[:, 0] * torch.sqrt(var)).mean()  # here

    y = torch.randn(4, 6)
    y[1] = 3.0
    return Tiny(), loss_fn, (torch.randn(4, 4), y)


@cases.add("forward", "log_prob xlogy log", "invalid_domain", samples=[0])
def beta_density_on_the_edge():
    def loss_fn(model, batch):
        x, a = batch
        alpha, beta = F.softplus(model(x)[:, :2]).unbind(1)
        return -Beta(1 + alpha, 1 + beta).log_prob(a).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0.0, 0.5, 0.2, 0.9]))


@cases.add("forward", "log_prob log", "log_of_nonpositive", samples=[1])
def normal_without_width():
    def loss_fn(model, batch):
        x, width = batch
        mean = model(x)[:, 0]
        return -Normal(mean, width, validate_args=False).log_prob(torch.ones_like(mean)).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0.3, 0.0, 0.2, 0.9]))


@cases.add("forward", "log_prob xlogy log", "invalid_domain", samples=[1])
def dirichlet_density_on_the_edge():
    def loss_fn(model, batch):
        x, p = batch
        return -Dirichlet(1.5 + F.softplus(model(x))).log_prob(p).mean()  # here

    p = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.4, 0.6], [0.1, 0.1, 0.8]])
    return Tiny(), loss_fn, (torch.randn(3, 4), p)


@cases.add("forward", "log", "invalid_domain", samples=[2])
def log_normal_density_of_zero():
    def loss_fn(model, batch):
        x, t = batch
        return -LogNormal(model(x)[:, 0], torch.ones(len(t)), validate_args=False).log_prob(t).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([1.0, 2.0, 0.0, 0.5]))


@cases.add("forward", "div", "division_by_zero", module="norm", samples=[2])
def instance_statistics_without_eps():
    class Norm(nn.Module):
        def forward(self, x):
            centred = x - x.mean(1, keepdim=True)
            return centred / centred.pow(2).mean(1, keepdim=True).sqrt()  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = Norm(), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.norm(x))

    x = torch.randn(5, 6)
    x[2] = 1.0
    return Net(), lambda m, b: m(b).pow(2).mean(), x


@cases.add("forward", "rsqrt", "division_by_zero", samples=[1])
def rsqrt_of_zero_power():
    def loss_fn(model, batch):
        x, signal = batch
        gain = torch.rsqrt(signal.pow(2).mean(1))  # here
        return (model(x)[:, 0] * gain).mean()

    signal = torch.randn(4, 16)
    signal[1] = 0
    return Tiny(), loss_fn, (torch.randn(4, 4), signal)


@cases.add("forward", "reciprocal div", "division_by_zero", samples=[0])
def inverse_depth_of_a_missing_pixel():
    def loss_fn(model, batch):
        x, depth = batch
        disparity = 1.0 / depth  # here
        return (model(x) - disparity).abs().mean()

    depth = torch.rand(4, 3) + 0.5
    depth[0, 1] = 0
    return Tiny(), loss_fn, (torch.randn(4, 4), depth)


@cases.add("forward", "pow", "division_by_zero")
def degree_normalisation_of_an_isolated_node():
    def loss_fn(model, batch):
        features, adjacency = batch
        scale = adjacency.sum(1).pow(-0.5)  # here
        return (scale[:, None] * (adjacency @ model(features)) * scale[:, None]).mean()

    adjacency = torch.ones(5, 5)
    adjacency[3] = 0
    adjacency[:, 3] = 0
    return Tiny(), loss_fn, (torch.randn(5, 4), adjacency)


@cases.add("forward", "div", "division_by_zero")
def python_zero_as_divisor():
    def loss_fn(model, batch):
        x, labels = batch
        positives = int(labels.sum())
        return (model(x)[:, 0] * labels).sum() / positives  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.zeros(4))


@cases.add("forward", "exp", "exp_overflow", samples=[3])
def softmax_written_by_hand():
    def loss_fn(model, batch):
        x, y = batch
        e = model(x).exp()  # here
        p = e / e.sum(1, keepdim=True)
        return -p.gather(1, y[:, None]).mean()

    x = torch.randn(4, 4)
    x[3] *= 1e4
    return Tiny(), loss_fn, (x, torch.tensor([0, 1, 2, 0]))


@cases.add("forward", "exp", "exp_overflow", samples=[1])
def importance_ratio_of_policies():
    def loss_fn(model, batch):
        x, old, advantage = batch
        ratio = torch.exp(model(x).log_softmax(1)[:, 0] - old)  # here
        return -(ratio * advantage).mean()

    return Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([-1.0, -300.0, -2.0]), torch.randn(3))


@cases.add("forward", "cosh", "exp_overflow", samples=[2])
def log_cosh_loss_of_an_outlier():
    def loss_fn(model, batch):
        x, y = batch
        return torch.log(torch.cosh(model(x)[:, 0] - y)).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0.0, 1.0, 500.0, 0.5]))


@cases.add("forward", "cross_entropy nll_loss nll_loss_forward", "empty_reduction")
def every_label_ignored():
    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.full((4,), -100))


@cases.add("forward", "mean", "empty_reduction")
def mean_over_no_positive_anchors():
    def loss_fn(model, batch):
        x, y = batch
        out = model(x)[:, 0]
        return out.pow(2).mean() + out[y > 0].mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.zeros(4))


@cases.add("forward", "std var", "empty_reduction")
def advantage_of_a_batch_of_one():
    def loss_fn(model, batch):
        v = model(batch)[:, 0]
        return ((v - v.mean()) / (v.std() + 1e-8)).mean() + v.mean()  # here

    return Tiny(), loss_fn, torch.randn(1, 4)


@cases.add("forward", "nanmean div", "empty_reduction")
def nanmean_of_only_missing_values():
    def loss_fn(model, batch):
        x, y = batch
        return model(x).mean() + torch.nanmean(y)  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.full((4,), math.nan))


@cases.add("forward", "ctc_loss", "infeasible_target", samples=[1])
def ctc_target_longer_than_input():
    class Acoustic(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)

        def forward(self, x):
            return self.out(self.rnn(x)[0]).log_softmax(-1)

    def loss_fn(model, batch):
        x, y, lengths = batch
        frames = torch.full((len(x),), 5)
        return F.ctc_loss(model(x).transpose(0, 1), y, frames, lengths)  # here

    y = torch.randint(1, 5, (3, 7))
    return Acoustic(), loss_fn, (torch.randn(3, 5, 4), y, torch.tensor([2, 7, 3]))


@cases.add("forward", "sub", "neg_inf_mask", samples=[1])
def logsumexp_of_a_fully_masked_row():
    def loss_fn(model, batch):
        x, mask = batch
        scores = model(x).masked_fill(mask, -math.inf)
        total = torch.logsumexp(scores, 1)
        return (total - total.max()).exp().sum() + (scores - total[:, None]).exp().sum()  # here

    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[1] = True
    return Tiny(), loss_fn, (torch.randn(3, 4), mask)


@cases.add("forward", "softmax", "neg_inf_mask", module="attend", samples=[2])
def attention_over_no_neighbours():
    class Attend(nn.Module):
        def forward(self, scores, mask):
            return torch.softmax(torch.where(mask, -math.inf, scores), -1)  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.attend = nn.Linear(4, 3), Attend()

        def forward(self, x, mask):
            return self.attend(self.q(x), mask)

    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2] = True
    return Net(), lambda m, b: m(*b)[:, 0].mean(), (torch.randn(4, 4), mask)


@cases.add("forward", "mul", "neg_inf_mask")
def entropy_of_masked_logits_by_hand():
    def loss_fn(model, batch):
        x, legal = batch
        logp = model(x).masked_fill(~legal, -math.inf).log_softmax(1)
        return (logp.exp() * logp).sum(1).mean()  # here

    legal = torch.tensor([[True, True, False], [True, True, True]])
    return Tiny(), loss_fn, (torch.randn(2, 4), legal)


@cases.add("forward", "mean sum cross_entropy", "neg_inf_mask")
def label_smoothing_over_masked_classes():
    def loss_fn(model, batch):
        x, y = batch
        logits = model(x).clone()
        logits[:, 2] = -math.inf
        logp = logits.log_softmax(1)
        return -(0.9 * logp.gather(1, y[:, None]).mean() + 0.1 * logp.mean())  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))


@cases.add("forward", "cross_entropy nll_loss nll_loss_forward", "neg_inf_mask", samples=[1])
def target_class_is_masked():
    def loss_fn(model, batch):
        x, y = batch
        mask = torch.tensor([False, False, True])
        return F.cross_entropy(model(x).masked_fill(mask, -math.inf), y)  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0, 2, 1, 0]))


@cases.add("forward", "linear addmm", "divergence", module="layers.1")
def deep_net_with_huge_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])
            for layer in self.layers:
                nn.init.constant_(layer.weight, 1e20)

        def forward(self, x):
            for layer in self.layers:
                x = F.relu(layer(x))  # here
            return x

    return Net(), lambda m, b: F.mse_loss(m(b), torch.zeros(len(b), 3)), torch.rand(4, 4) + 1


@cases.add("forward", "mul", "divergence", module="cell")
def recurrence_that_explodes():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(3e3))

        def forward(self, h):
            return h * self.gain  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.cell = nn.Linear(4, 4), Cell()

        def forward(self, x):
            h = self.inp(x)
            for _ in range(15):
                h = self.cell(h)
            return h

    return Net(), lambda m, b: m(b).mean(), torch.randn(4, 4)


@cases.add(
    "forward", "norm div weight_norm weight_norm_interface", "division_by_zero", module="head.parametrizations.weight.0"
)
def weight_norm_of_zero_rows():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            head = nn.Linear(4, 2)
            nn.init.zeros_(head.weight)
            self.head = nn.utils.parametrizations.weight_norm(head)

        def forward(self, x):
            return self.head(x)  # here

    return Net(), lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4)


@cases.add("forward", "logit", "log_of_nonpositive", samples=[0])
def logit_of_a_certain_label():
    def loss_fn(model, batch):
        x, p = batch
        return (model(x)[:, 0] - torch.logit(p)).pow(2).mean()  # here

    return Tiny(), loss_fn, (torch.randn(3, 4), torch.tensor([1.0, 0.4, 0.7]))


@cases.add("forward", "lgamma", "invalid_domain", samples=[2])
def lgamma_of_zero_counts():
    def loss_fn(model, batch):
        x, n = batch
        return (model(x)[:, 0] + torch.lgamma(n)).mean()  # here

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([1.0, 2.0, 0.0, 3.0]))


@cases.add("forward", "log", "log_of_nonpositive", module="head", samples=[1])
def log_of_relu_output():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 1)

        def forward(self, x):
            return torch.log(F.relu(self.lin(x)))  # here

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Head()
            with torch.no_grad():
                self.head.lin.weight.fill_(1.0)
                self.head.lin.bias.fill_(0.0)

        def forward(self, x):
            return {"rate": self.head(x)}

    x = torch.rand(3, 4) + 0.1
    x[1] = -1
    return Net(), lambda m, b: {"loss": m(b["x"])["rate"].mean(), "n": 3}, {"x": x, "ids": ["a", "b", "c"]}


@cases.add("forward", "mean", "neg_inf_mask")
def mean_over_masked_scores():
    def loss_fn(model, batch):
        scores = model(batch).masked_fill(torch.tensor([False, False, True]), -math.inf)
        return scores.softmax(1)[:, 0].mean() + 0.1 * scores.mean()  # here

    return Tiny(), loss_fn, torch.randn(3, 4)


@cases.add("forward", "sub", "neg_inf_mask")
def divergence_between_masked_policies():
    def loss_fn(model, batch):
        mask = torch.tensor([False, False, True])
        p = model(batch).masked_fill(mask, -math.inf).log_softmax(1)
        q = model(2 * batch).masked_fill(mask, -math.inf).log_softmax(1)
        return (p.exp() * (p - q)).sum(1).mean()  # here

    return Tiny(), loss_fn, torch.randn(3, 4)


@cases.add("forward", "getitem index", "infeasible_target")
def forbidden_transition_in_a_label_sequence():
    def loss_fn(model, batch):
        x, tags = batch
        allowed = torch.zeros(3, 3).masked_fill(torch.eye(3, dtype=torch.bool), -math.inf)
        score = model(x).gather(1, tags[:, None]).sum() + allowed[tags[:-1], tags[1:]].sum()  # here
        return torch.logsumexp(model(x), 1).sum() - score

    return Tiny(), loss_fn, (torch.randn(4, 4), torch.tensor([0, 1, 1, 2]))


@cases.add("forward", "multi_head_attention_forward softmax", "neg_inf_mask", module="attention")
def additive_mask_with_a_dead_row():
    mask = torch.zeros(5, 5)
    mask[2] = -math.inf

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, attn_mask=mask)[0]  # here

    return Net(), lambda m, b: m(b).pow(2).mean(), torch.randn(3, 5, 8)


@cases.add("forward", "log", "log_of_nonpositive", samples=[1])
def nan_to_num_makes_the_mean_overflow():
    def loss_fn(model, batch):
        return torch.log(model(batch).pow(2)).nan_to_num().mean()  # here

    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, loss_fn, x


@cases.add("forward", "exp", "exp_overflow")
def sigmoid_written_by_hand():
    def loss_fn(model, batch):
        return (1 / (1 + torch.exp(-1e3 * model(batch)))).mean()  # here

    return Tiny(), loss_fn, torch.randn(6, 4)


@cases.add("forward", "linalg_inv inv", "degenerate_decomposition", line=True)
def inverse_of_a_singular_matrix():
    def loss_fn(model, batch):
        out = model(batch)
        return torch.linalg.inv(0 * out.T @ out).sum()  # here

    return Tiny(), loss_fn, torch.randn(6, 4)


@cases.add("forward", "rnn_relu addmm linear", "divergence", module="rnn")
def relu_recurrence_with_a_gain_above_one():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(4, 8, nonlinearity="relu", batch_first=True), nn.Linear(8, 1)
            nn.init.constant_(self.rnn.weight_hh_l0, 3.0)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])  # here

    return Net(), lambda m, b: m(b).mean(), torch.rand(3, 120, 4)


@cases.add("forward", "normalize div", "division_by_zero", samples=[1])
def normalize_without_eps():
    model = Tiny()
    nn.init.zeros_(model.body.bias)
    x = torch.randn(3, 4)
    x[1] = 0
    return model, lambda m, b: F.normalize(m(b), dim=1, eps=0.0).mean(), x  # here


@pytest.mark.parametrize("case", cases, ids=lambda case: case.id)
def test_forward(case: Case) -> None:
    check(case)
