"""The fp16 loss scaler: it reacts to a step, or forgets it."""

import pytest
import torch

from safetrain.precision.scaler import LossScaler

CPU = torch.device("cpu")


def step(scaler, value, others=()):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale((parameter * value).sum()).backward()
    scaler.unscale(optimizer, [parameter, *others])
    return parameter.grad


def test_gradients_come_out_in_their_true_size():
    other = torch.nn.Parameter(torch.ones(1))
    scaler = LossScaler("cpu")
    scaler.scale(3 * other.sum()).backward()
    assert step(scaler, 2.0, [other]).tolist() == [2.0, 2.0]
    assert other.grad.tolist() == [3.0]


@pytest.mark.parametrize(("value", "factor"), [(1.0, 1.0), (float("inf"), 0.5), (float("nan"), 0.5)])
def test_an_overflow_halves_the_scale(value, factor):
    scaler = LossScaler("cpu")
    before = float(scaler.current(CPU))
    step(scaler, value)
    scaler.update()
    assert float(scaler.current(CPU)) == before * factor


def test_a_forgotten_step_leaves_the_scale_and_its_history():
    scaler = LossScaler("cpu")
    before = float(scaler.current(CPU))
    state = scaler.state_dict()
    step(scaler, float("inf"))
    scaler.keep(before)
    assert scaler.state_dict() == state
    step(scaler, 1.0)  # and the next one can be unscaled
    scaler.update()
    assert float(scaler.current(CPU)) == before


def test_a_step_without_gradients_teaches_nothing():
    scaler = LossScaler("cpu")
    before = float(scaler.current(CPU))
    parameter = torch.nn.Parameter(torch.ones(2))
    scaler.unscale(torch.optim.SGD([parameter], lr=0.1), [parameter])
    scaler.update()
    assert float(scaler.current(CPU)) == before


def test_a_step_that_came_to_no_backward_is_forgotten_before_the_scaler_was_ever_used():
    scaler = LossScaler("cpu")
    state = scaler.state_dict()
    scaler.keep(1.0)
    assert scaler.state_dict() == state


def test_its_state_goes_on():
    first, second = LossScaler("cpu"), LossScaler("cpu")
    step(first, float("inf"))
    first.update()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.current(CPU), first.current(CPU))
