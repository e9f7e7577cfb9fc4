"""The schedule moves once per committed step, and a scale on top of it never reaches it."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from safetrain.optim.schedule import Schedule, scaled_lr


def two_groups(lr=0.1):
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 10 * lr}], lr=lr)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_every_group_is_scaled_inside_and_exactly_as_before_afterwards():
    optimizer = two_groups(lr=0.3)
    before = rates(optimizer)
    with scaled_lr(optimizer, 1.0):
        assert all(lr is known for lr, known in zip(rates(optimizer), before, strict=True))
    with scaled_lr(optimizer, 0.1):
        assert rates(optimizer) == [0.3 * 0.1, 3.0 * 0.1]
    assert rates(optimizer) == before == [0.3, 3.0]


def test_the_scale_is_taken_off_when_the_step_raises():
    optimizer = two_groups()
    with pytest.raises(RuntimeError, match="no kernel"), scaled_lr(optimizer, 0.5):
        raise RuntimeError("no kernel")
    assert rates(optimizer) == [0.1, 1.0]


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    lr = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    with scaled_lr(optimizer, 0.5):
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
        assert float(lr) == pytest.approx(0.1)
    assert optimizer.param_groups[0]["lr"] is lr


def test_groups_without_a_learning_rate_are_passed_over():
    optimizer = two_groups()
    del optimizer.param_groups[0]["lr"]
    with scaled_lr(optimizer, 0.5):
        assert "lr" not in optimizer.param_groups[0]
        assert optimizer.param_groups[1]["lr"] == 0.5
    assert Schedule(optimizer).lrs == (0.0, 1.0)


def test_a_scaled_step_does_not_change_the_schedule():
    optimizer, plain = two_groups(), two_groups()
    schedule, expected = Schedule(optimizer, StepLR(optimizer, 2, gamma=0.5)), StepLR(plain, 2, gamma=0.5)
    for scale in (1.0, 0.25, 0.25, 1.0):
        with scaled_lr(optimizer, scale):
            optimizer.step()
        schedule.step()
        plain.step()
        expected.step()
        assert rates(optimizer) == rates(plain)
    assert schedule.lrs == tuple(rates(plain))


class Constant:
    def step(self) -> None:
        pass


def test_without_a_scheduler_the_rate_stays_and_there_is_no_state():
    optimizer = two_groups()
    schedule = Schedule(optimizer)
    optimizer.step()
    schedule.step()
    schedule.step_with_metric(1.0)
    schedule.load_state_dict(None)
    assert (schedule.lrs, schedule.error, schedule.state_dict()) == ((0.1, 1.0), None, None)
    assert Schedule(optimizer, Constant()).state_dict() is None


def test_only_a_plateau_follows_the_metric_and_nothing_else():
    optimizer = two_groups()
    schedule = Schedule(optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    for _ in range(3):
        schedule.step()
    assert schedule.needs_metric
    assert schedule.lrs == (0.1, 1.0)
    schedule.step_with_metric(1.0)
    schedule.step_with_metric(2.0)
    assert schedule.lrs == (0.05, 0.5)
    other = Schedule(optimizer, StepLR(optimizer, 1))
    other.step_with_metric(1.0)
    assert not other.needs_metric
    assert other.lrs == (0.05, 0.5)


def test_an_error_of_the_scheduler_is_kept():
    optimizer = two_groups()
    factors = [1.0, 0.5]
    schedule = Schedule(optimizer, LambdaLR(optimizer, lambda step: factors[step]))
    optimizer.step()
    schedule.step()
    assert schedule.error is None
    assert schedule.lrs == (0.05, 0.5)
    optimizer.step()
    schedule.step()
    assert isinstance(schedule.error, IndexError)


def test_the_state_can_be_loaded_into_another_schedule():
    optimizer, other = two_groups(), two_groups()
    schedule, resumed = Schedule(optimizer, StepLR(optimizer, 3)), Schedule(other, StepLR(other, 3))
    for _ in range(2):
        optimizer.step()
        schedule.step()
    resumed.load_state_dict(schedule.state_dict())
    other.step()
    resumed.step()
    assert resumed.scheduler.last_epoch == 3
    assert resumed.lrs == pytest.approx((0.01, 0.1))
