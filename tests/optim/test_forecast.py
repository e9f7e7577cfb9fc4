"""A schedule made for epochs that is stepped after every step is noticed before the first one."""

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from safetrain.optim.forecast import doubt, forecast
from safetrain.optim.schedule import Schedule


def schedule(make, every="step"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return Schedule(optimizer, make(optimizer), every)


def warmup_then_cosine(optimizer):
    parts = [LinearLR(optimizer, 1e-4, 1.0, 100), CosineAnnealingLR(optimizer, 900)]
    return SequentialLR(optimizer, parts, milestones=[100])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: StepLR(o, 1, 0.5), "falls from 0.1 to 9.77e-05 by step 10"),
        (lambda o: CosineAnnealingLR(o, T_max=10), "falls from 0.1 to 0 by step 10"),
        (lambda o: ExponentialLR(o, 0.95), "by step 135"),
        (lambda o: LambdaLR(o, lambda epoch: 0.5**epoch), "by step 10"),
        (lambda o: CosineAnnealingLR(o, T_max=10, eta_min=1e-3), "goes up and down 49 times"),
        (lambda o: CosineAnnealingWarmRestarts(o, 2), "goes up and down 499 times"),
        (lambda o: MultiStepLR(o, [5, 8], 0.1), "only in the first 8 of them"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=10), "ends after 11 of 1000 steps"),
    ],
)
def test_what_counts_epochs_is_noticed_when_it_is_stepped_after_every_step(make, says):
    found = doubt(schedule(make), num_steps=1000, num_epochs=10)
    assert says in found.reason
    assert "scheduler.every: epoch" in found.fix
    over_epochs = schedule(make, "epoch")
    assert doubt(over_epochs, num_steps=1000, num_epochs=10) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CosineAnnealingLR(o, T_max=1000),
        lambda o: ExponentialLR(o, 0.999),
        lambda o: MultiStepLR(o, [500, 800], 0.1),
        lambda o: OneCycleLR(o, 0.1, total_steps=1000),
        lambda o: CosineAnnealingWarmRestarts(o, 100),
        lambda o: LambdaLR(o, lambda step: min(1.0, step / 10)),
        lambda o: LambdaLR(o, lambda step: (step + 1) ** -0.5),
        warmup_then_cosine,
    ],
)
def test_a_schedule_over_steps_is_left_alone(make):
    assert doubt(schedule(make), num_steps=1000, num_epochs=10) is None


def test_a_schedule_over_steps_that_is_stepped_once_per_epoch_is_noticed():
    found = doubt(schedule(lambda o: CosineAnnealingLR(o, T_max=1000), "epoch"), num_steps=1000, num_epochs=10)
    assert "less than 2% in 10 epochs" in found.reason


def test_a_forecast_changes_nothing():
    tried = schedule(warmup_then_cosine)
    before = tried.lrs, repr(tried.state_dict()["last_epoch"])
    assert len(forecast(tried, 50).rates) == 50
    assert (tried.lrs, repr(tried.state_dict()["last_epoch"])) == before
