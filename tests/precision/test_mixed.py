"""The fp16 loss scaler: it reacts to a step, or forgets it."""

import pytest
import torch

from safetrain.precision.mixed import Precision

CPU = torch.device("cpu")


def step(scaler, value, others=()):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.backward((parameter * value).sum())
    scaler.unscale(optimizer, [parameter, *others])
    return parameter.grad


def test_gradients_come_out_in_their_true_size():
    other = torch.nn.Parameter(torch.ones(1))
    scaler = Precision("fp16", CPU)
    scaler.backward(3 * other.sum())
    assert step(scaler, 2.0, [other]).tolist() == [2.0, 2.0]
    assert other.grad.tolist() == [3.0]


@pytest.mark.parametrize(("value", "factor"), [(1.0, 1.0), (float("inf"), 0.5), (float("nan"), 0.5)])
def test_an_overflow_halves_the_scale(value, factor):
    scaler = Precision("fp16", CPU)
    before = scaler.host_loss_scale()
    step(scaler, value)
    scaler.update_scale()
    assert scaler.host_loss_scale() == before * factor


def test_a_forgotten_step_leaves_the_scale_and_its_history():
    scaler = Precision("fp16", CPU)
    before = scaler.host_loss_scale()
    state = scaler.state_dict()
    step(scaler, float("inf"))
    scaler.keep_scale(before)
    assert scaler.state_dict() == state
    step(scaler, 1.0)  # and the next one can be unscaled
    scaler.update_scale()
    assert scaler.host_loss_scale() == before


def test_a_step_without_gradients_teaches_nothing():
    scaler = Precision("fp16", CPU)
    before = scaler.host_loss_scale()
    parameter = torch.nn.Parameter(torch.ones(2))
    scaler.unscale(torch.optim.SGD([parameter], lr=0.1), [parameter])
    scaler.update_scale()
    assert scaler.host_loss_scale() == before


def test_a_step_that_came_to_no_backward_is_forgotten_before_the_scaler_was_ever_used():
    scaler = Precision("fp16", CPU)
    state = scaler.state_dict()
    scaler.keep_scale(1.0)
    assert scaler.state_dict() == state


def test_its_state_goes_on():
    first, second = Precision("fp16", CPU), Precision("fp16", CPU)
    step(first, float("inf"))
    first.update_scale()
    second.load_state_dict(first.state_dict())
    assert second.host_loss_scale() == first.host_loss_scale()
