"""Failures whose first bad value appears in the forward pass: of the loss's own operations, then of modules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from forensic_cases import Apply, Case, Cases, Tiny, chain, check, without_bias
from torch import nn
from torch.distributions import Beta, Dirichlet, LogNormal, Normal

cases = Cases()
PROBABILITIES = [[0.2, 0.3, 0.5], [0.0, 0.4, 0.6], [0.1, 0.1, 0.8]]
LAST_CLASS = torch.tensor([False, False, True])


@cases.loss("forward", "log", "log_of_nonpositive", PROBABILITIES, rows=3, samples=[1])
def kl_by_hand_with_a_zero_probability(model, x, q):
    log_q = torch.log(q)  # here
    return (q * (log_q - model(x).log_softmax(1))).sum(1).mean()


@cases.loss("forward", "log", "log_of_nonpositive", [1.0, 0, 0, 1, 0], rows=5, scale={2: 1e4}, samples=[2])
def focal_loss_of_saturated_probability(model, x, y):
    p = torch.sigmoid(model(x)[:, 0])
    return -((1 - p) ** 2 * y * torch.log(p) + p**2 * (1 - y) * torch.log(1 - p)).mean()  # here


@cases.loss("forward", "log1p", "log_of_nonpositive", [-1.0, 0.2, 0.1, 0.3], samples=[0])
def log1p_of_minus_one(model, x, returns):
    return (model(x)[:, 0] - torch.log1p(returns)).pow(2).mean()  # here


@cases.loss("forward", "xlogy", "log_of_nonpositive", [0.0, 0.5, 1.0], [0.0, 0.0, 0.5], rows=3, samples=[1])
def xlogy_of_positive_times_log_zero(model, x, p, q):
    return torch.special.xlogy(p, q).mean() + model(x).mean()  # here


@cases.loss("forward", "erfinv", "invalid_domain", [0.5, 0.4, 1.0, 0.3], samples=[2])
def inverse_normal_of_a_quantile_of_one(model, x, u):
    z = torch.erfinv(2 * u - 1)  # here
    return (model(x)[:, 0] - z).pow(2).mean()


@cases.loss("forward", "acosh", "invalid_domain", [1.5, 2.0, 1.1, 0.99], samples=[3])
def hyperbolic_distance_below_one(model, x, d):
    return (model(x)[:, 0] + torch.acosh(d)).mean()  # here


@cases.loss("forward", "sqrt", "invalid_domain", [[1.0, 2, 4], [3, 3, 3], [5, 1, 2], [0, 2, 7]], samples=[1])
def negative_variance_by_cancellation(model, x, y):
    var = (y**2).mean(1) - y.mean(1) ** 2 - 1e-3
    return (model(x)[:, 0] * torch.sqrt(var)).mean()  # here


@cases.loss("forward", "log_prob xlogy log", "invalid_domain", [0.0, 0.5, 0.2, 0.9], samples=[0])
def beta_density_on_the_edge(model, x, a):
    alpha, beta = F.softplus(model(x)[:, :2]).unbind(1)
    return -Beta(1 + alpha, 1 + beta).log_prob(a).mean()  # here


@cases.loss("forward", "log_prob log", "log_of_nonpositive", [0.3, 0.0, 0.2, 0.9], samples=[1])
def normal_without_width(model, x, width):
    mean = model(x)[:, 0]
    return -Normal(mean, width, validate_args=False).log_prob(torch.ones_like(mean)).mean()  # here


@cases.loss("forward", "log_prob xlogy log", "invalid_domain", PROBABILITIES, rows=3, samples=[1])
def dirichlet_density_on_the_edge(model, x, p):
    return -Dirichlet(1.5 + F.softplus(model(x))).log_prob(p).mean()  # here


@cases.loss("forward", "log", "invalid_domain", [1.0, 2.0, 0.0, 0.5], samples=[2])
def log_normal_density_of_zero(model, x, t):
    return -LogNormal(model(x)[:, 0], torch.ones(len(t)), validate_args=False).log_prob(t).mean()  # here


@cases.loss("forward", "rsqrt", "division_by_zero", [[1.0, -2], [0, 0], [3, 1], [-1, 4]], samples=[1])
def rsqrt_of_zero_power(model, x, signal):
    gain = torch.rsqrt(signal.pow(2).mean(1))  # here
    return (model(x)[:, 0] * gain).mean()


@cases.loss("forward", "reciprocal div", "division_by_zero", [[0.5, 0.0, 1], [1, 1, 1], [2, 1, 1]], rows=3, samples=[0])
def inverse_depth_of_a_missing_pixel(model, x, depth):
    disparity = 1.0 / depth  # here
    return (model(x) - disparity).abs().mean()


@cases.loss("forward", "pow", "division_by_zero", [[1.0, 0, 1], [0, 0, 0], [1, 0, 1]], rows=3)
def degree_normalisation_of_an_isolated_node(model, features, adjacency):
    scale = adjacency.sum(1).pow(-0.5)  # here
    return (scale[:, None] * (adjacency @ model(features)) * scale[:, None]).mean()


@cases.loss("forward", "div", "division_by_zero", torch.zeros(4))
def python_zero_as_divisor(model, x, labels):
    positives = int(labels.sum())
    return (model(x)[:, 0] * labels).sum() / positives  # here


@cases.loss("forward", "div", "division_by_zero", rows=3)
def division_by_a_difference_of_equals(model, batch):
    """x / (x - x): anomaly mode says nothing of it, because no backward op returns NaN first."""
    x = model(batch)
    return (x / (x - x)).mean()  # here


@cases.loss("forward", "exp", "exp_overflow", [0, 1, 2, 1], scale={3: 1e4}, samples=[3])
def softmax_written_by_hand(model, x, y):
    e = model(x).exp()  # here
    p = e / e.sum(1, keepdim=True)
    return -p.gather(1, y[:, None]).mean()


@cases.loss("forward", "exp", "exp_overflow", [-1.0, -300.0, -2.0], [0.5, -1.0, 2.0], rows=3, samples=[1])
def importance_ratio_of_policies(model, x, old, advantage):
    ratio = torch.exp(model(x).log_softmax(1)[:, 0] - old)  # here
    return -(ratio * advantage).mean()


@cases.loss("forward", "cosh", "exp_overflow", [0.0, 1.0, 500.0, 0.5], samples=[2])
def log_cosh_loss_of_an_outlier(model, x, y):
    return torch.log(torch.cosh(model(x)[:, 0] - y)).mean()  # here


@cases.loss("forward", "cross_entropy nll_loss nll_loss_forward", "empty_reduction", [-100] * 4)
def every_label_ignored(model, x, y):
    return F.cross_entropy(model(x), y)  # here


@cases.loss("forward", "mean", "empty_reduction", torch.zeros(4))
def mean_over_no_positive_anchors(model, x, y):
    out = model(x)[:, 0]
    return out.pow(2).mean() + out[y > 0].mean()  # here


@cases.loss("forward", "std var", "empty_reduction", rows=1)
def advantage_of_a_batch_of_one(model, batch):
    v = model(batch)[:, 0]
    return ((v - v.mean()) / (v.std() + 1e-8)).mean() + v.mean()  # here


@cases.loss("forward", "nanmean div", "empty_reduction", [math.nan] * 4)
def nanmean_of_only_missing_values(model, x, y):
    return model(x).mean() + torch.nanmean(y)  # here


@cases.loss("forward", "sub", "neg_inf_mask", [[False] * 3, [True] * 3, [False] * 3], rows=3, samples=[1])
def logsumexp_of_a_fully_masked_row(model, x, mask):
    scores = model(x).masked_fill(mask, -math.inf)
    total = torch.logsumexp(scores, 1)
    return (total - total.max()).exp().sum() + (scores - total[:, None]).exp().sum()  # here


@cases.loss("forward", "mul", "neg_inf_mask", [[True, True, False], [True, True, True]], rows=2)
def entropy_of_masked_logits_by_hand(model, x, legal):
    logp = model(x).masked_fill(~legal, -math.inf).log_softmax(1)
    return (logp.exp() * logp).sum(1).mean()  # here


@cases.loss("forward", "mean sum cross_entropy", "neg_inf_mask", [0, 1, 0, 1])
def label_smoothing_over_masked_classes(model, x, y):
    logits = model(x).clone()
    logits[:, 2] = -math.inf
    logp = logits.log_softmax(1)
    return -(0.9 * logp.gather(1, y[:, None]).mean() + 0.1 * logp.mean())  # here


@cases.loss("forward", "cross_entropy nll_loss nll_loss_forward", "neg_inf_mask", [0, 2, 1, 0], samples=[1])
def target_class_is_masked(model, x, y):
    return F.cross_entropy(model(x).masked_fill(LAST_CLASS, -math.inf), y)  # here


@cases.loss("forward", "mul", "divergence", rows=3)
def repeated_squaring(model, batch):
    """The square that overflows is named, not one after it."""
    h = model(batch) + 10
    for _ in range(8):
        h = h * h  # here
    return h.mean()


@cases.loss("forward", "log", "log_of_nonpositive", torch.eye(3), rows=3)
def log_of_a_softmax_that_underflowed(model, x, y):
    p = torch.softmax(1e3 * model(x), 1)
    return -(y * torch.log(p)).sum(1).mean()  # here: 0 * -inf where the probability is 0


@cases.loss("forward", "log", "log_of_nonpositive", [0.0, 1.0, 0.0], rows=3, fix="logsigmoid")
def sigmoid_then_log_at_saturation(model, x, y):
    p = torch.sigmoid(1e4 * model(x)[:, 0])
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # here


@cases.loss("forward", "logit", "log_of_nonpositive", [1.0, 0.4, 0.7], rows=3, samples=[0])
def logit_of_a_certain_label(model, x, p):
    return (model(x)[:, 0] - torch.logit(p)).pow(2).mean()  # here


@cases.loss("forward", "lgamma", "invalid_domain", [1.0, 2.0, 0.0, 3.0], samples=[2])
def lgamma_of_zero_counts(model, x, n):
    return (model(x)[:, 0] + torch.lgamma(n)).mean()  # here


@cases.loss("forward", "mean", "neg_inf_mask", rows=3)
def mean_over_masked_scores(model, batch):
    scores = model(batch).masked_fill(LAST_CLASS, -math.inf)
    return scores.softmax(1)[:, 0].mean() + 0.1 * scores.mean()  # here


@cases.loss("forward", "sub", "neg_inf_mask", rows=3)
def divergence_between_masked_policies(model, batch):
    p = model(batch).masked_fill(LAST_CLASS, -math.inf).log_softmax(1)
    q = model(2 * batch).masked_fill(LAST_CLASS, -math.inf).log_softmax(1)
    return (p.exp() * (p - q)).sum(1).mean()  # here


@cases.loss("forward", "getitem index", "infeasible_target", [0, 1, 1, 2])
def forbidden_transition_in_a_label_sequence(model, x, tags):
    allowed = torch.zeros(3, 3).masked_fill(torch.eye(3, dtype=torch.bool), -math.inf)
    score = model(x).gather(1, tags[:, None]).sum() + allowed[tags[:-1], tags[1:]].sum()  # here
    return torch.logsumexp(model(x), 1).sum() - score


@cases.loss("forward", "log", "log_of_nonpositive", rows=3, silent=1, samples=[1])
def nan_to_num_makes_the_mean_overflow(model, batch):
    return torch.log(model(batch).pow(2)).nan_to_num().mean()  # here


@cases.loss("forward", "exp", "exp_overflow", rows=6)
def sigmoid_written_by_hand(model, batch):
    return (1 / (1 + torch.exp(-1e3 * model(batch)))).mean()  # here


@cases.loss("forward", "linalg_inv inv", "degenerate_decomposition", rows=6)
def inverse_of_a_singular_matrix(model, batch):
    out = model(batch)
    return torch.linalg.inv(0 * out.T @ out).sum()  # here


@cases.loss("forward", "normalize div", "division_by_zero", rows=3, silent=1, samples=[1])
def normalize_without_eps(model, batch):
    return F.normalize(model(batch), dim=1, eps=0.0).mean()  # here


@cases.add("forward", "pow", "invalid_domain", module="curve")
def gamma_curve_of_negative_pixels():
    model = chain(conv=nn.Conv2d(3, 3, 1), curve=lambda x: x ** (1 / 2.2))  # here
    return model, lambda m, b: m(b).mean(), torch.randn(4, 3, 4, 4)


@cases.add("forward", "div", "division_by_zero", module="norm", samples=[2])
def instance_statistics_without_eps():
    def norm(x):
        centred = x - x.mean(1, keepdim=True)
        return centred / centred.pow(2).mean(1, keepdim=True).sqrt()  # here

    x = torch.randn(5, 6)
    x[2] = 1.0
    return chain(norm=norm, head=nn.Linear(6, 2)), lambda m, b: m(b).pow(2).mean(), x


@cases.add("forward", "ctc_loss", "infeasible_target", samples=[1])
def ctc_target_longer_than_input():
    def loss_fn(model, batch):
        x, y, lengths = batch
        frames = torch.full((len(x),), 5)
        return F.ctc_loss(model(x).transpose(0, 1), y, frames, lengths)  # here

    acoustic = chain(rnn=nn.GRU(4, 8, batch_first=True), out=lambda both: both[0][..., :5].log_softmax(-1))
    return acoustic, loss_fn, (torch.randn(3, 5, 4), torch.randint(1, 5, (3, 7)), torch.tensor([2, 7, 3]))


@cases.add("forward", "softmax", "neg_inf_mask", module="attend", samples=[2])
def attention_over_no_neighbours():
    def loss_fn(model, batch):
        x, mask = batch
        return model.attend(model.q(x), mask)[:, 0].mean()

    attend = Apply(lambda scores, mask: torch.where(mask, -math.inf, scores).softmax(-1))  # here
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2] = True
    return chain(q=nn.Linear(4, 3), attend=attend), loss_fn, (torch.randn(4, 4), mask)


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
    def loss_fn(model, h):
        for _ in range(15):
            h = model.cell(h, model.inp.weight[0, 0])
        return h.mean()

    model = chain(inp=nn.Linear(4, 4), cell=lambda h, gain: h * gain)  # here
    nn.init.constant_(model.inp.weight, 3e3)
    return model, loss_fn, torch.randn(4, 4)


@cases.add(
    "forward", "norm div weight_norm weight_norm_interface", "division_by_zero", module="head.parametrizations.weight.0"
)
def weight_norm_of_zero_rows():
    head = nn.Linear(4, 2)
    nn.init.zeros_(head.weight)
    model = chain(head=nn.utils.parametrizations.weight_norm(head))
    return model, lambda m, b: m(b).pow(2).mean(), torch.randn(3, 4)  # here


@cases.add("forward", "log", "log_of_nonpositive", module="head", samples=[1])
def log_of_relu_output():
    class Head(Tiny):
        def forward(self, x):
            return torch.log(F.relu(self.body(x)))  # here

    x = torch.rand(3, 4) + 0.1
    x[1] = -1
    model = chain(head=without_bias(Head(out=1), weight=1.0), named=lambda rate: {"rate": rate})
    return model, lambda m, b: {"loss": m(b["x"])["rate"].mean(), "n": 3}, {"x": x, "ids": ["a", "b", "c"]}


@cases.add("forward", "multi_head_attention_forward softmax", "neg_inf_mask", module="attention")
def additive_mask_with_a_dead_row():
    def loss_fn(model, x):
        mask = torch.zeros(5, 5)
        mask[2] = -math.inf
        return model.attention(x, x, x, attn_mask=mask)[0].pow(2).mean()  # here

    return chain(attention=nn.MultiheadAttention(8, 2, batch_first=True)), loss_fn, torch.randn(3, 5, 8)


@cases.add("forward", "rnn_relu addmm linear", "divergence", module="rnn")
def relu_recurrence_with_a_gain_above_one():
    model = chain(rnn=nn.RNN(4, 8, nonlinearity="relu", batch_first=True))
    nn.init.constant_(model.rnn.weight_hh_l0, 3.0)
    return model, lambda m, b: m(b)[0][:, -1].mean(), torch.rand(3, 120, 4)  # here


@pytest.mark.parametrize("case", cases, ids=lambda case: case.id)
def test_forward(case: Case) -> None:
    check(case)
