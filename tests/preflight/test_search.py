"""Operations with a singular point are driven there before training, and what is reported is reproduced."""

import pytest
import torch
from preflight_cases import make_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from safetrain.preflight.singular import plausible


def log_of_softmax(model, batch):
    p = model(batch[0]).softmax(1)
    return -(F.one_hot(batch[1], 3) * torch.log(p)).sum(1).mean()


def log_of_sigmoid(model, batch):
    p = torch.sigmoid(model(batch[0])[:, 0])
    return -torch.log(1 - p).mean()


def unbounded_exponential(model, batch):
    return model(batch[0]).exp().mean()


def root_of_a_difference(model, batch):
    return torch.sqrt(model(batch[0])[:, 0] - batch[0].amin() + 2).mean()


def divided_by_a_sum(model, batch):
    hidden = model(batch[0]).relu()
    return (hidden / hidden.sum(1, keepdim=True)).square().mean() if float(hidden.detach().sum(1).min()) >= 0 else None


def arc_cosine(model, batch):
    return torch.acos(model(batch[0]) / 10).mean()


def with_an_eps(model, batch):
    return -torch.log(model(batch[0]).softmax(1) + 1e-6).mean()


def fused(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def squares_below_a_root(model, batch):
    return torch.sqrt(model(batch[0]).square().sum(1) + 1e-6).mean()


def outcome(loss, model=None, data=None):
    model = nn.Linear(8, 3) if model is None else model
    return make_trainer(data, model, loss).check(only="singular_points", budget=30)["singular_points"]


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (log_of_softmax, "log_of_nonpositive"),
        (log_of_sigmoid, "log_of_nonpositive"),
        (unbounded_exponential, "exp_overflow"),
        (root_of_a_difference, "invalid_domain"),
        (arc_cosine, "invalid_domain"),
    ],
)
def test_a_singular_point_is_found_and_its_fix_was_tried(loss, cause):
    found = outcome(loss)
    assert found.status == "WARN", found.reason
    assert cause in found.reason
    assert "Verified" in found.fix


@pytest.mark.parametrize("loss", [with_an_eps, fused, squares_below_a_root])
def test_what_cannot_be_reached_is_not_reported(loss):
    assert outcome(loss).status in ("PASS", "SKIP")


def test_images_stay_between_0_and_1():
    images = TensorDataset(torch.rand(64, 1, 8, 8), torch.randint(3, (64,)))
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    found = outcome(log_of_softmax, model, images)
    assert (found.status, plausible(images.tensors[0])) == ("WARN", (0.0, 1.0))


def test_weights_are_put_back():
    model = nn.Linear(8, 3)
    before = [weight.detach().clone() for weight in model.parameters()]
    assert outcome(log_of_softmax, model).status == "WARN"
    assert all(map(torch.equal, before, model.parameters()))
