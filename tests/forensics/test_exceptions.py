"""Is an exception about a number, about some samples, or about the program? Decided by replay, the same for trainer and investigate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forensic_cases import Tiny, incident_of
from torch import Tensor, nn

from safetrain.forensics import investigate


def shares(x: Tensor) -> Tensor:
    return x / x.sum(1, keepdim=True)


def index_made_of_nan(model: nn.Module, x: Tensor) -> Tensor:
    table = torch.arange(10.0)
    rows = (shares(x).sum(1) * 2).round().long()
    return (model(x).mean(1) * table[rows]).mean()


def step_size_too_small(model: nn.Module, x: Tensor) -> Tensor:
    step = shares(x).mean()
    if not step > 0:
        raise RuntimeError("underflow in dt")
    return model(x).square().mean() * step


def asserts_its_input(model: nn.Module, x: Tensor) -> Tensor:
    assert bool((x.sum(1) > 0).all()), "boxes must be in another format"
    return model(x).square().mean()


def batch() -> Tensor:
    x = torch.rand(8, 4) + 0.1
    x[3] = 0
    return x


@pytest.mark.parametrize("loss_fn", [index_made_of_nan, step_size_too_small])
def test_origin_is_the_bad_value_before_the_exception(loss_fn: Callable[..., Any]) -> None:
    incident = incident_of(Tiny(), loss_fn, batch())
    assert incident.trigger.signal == "exception"
    assert (incident.origin.name, incident.cause.label, incident.samples) == ("div", "division_by_zero", [3])


def test_raised_by_one_sample() -> None:
    incident = incident_of(Tiny(), asserts_its_input, batch())
    assert (incident.origin.name, incident.cause.label, incident.samples) == ("AssertionError", "bad_input_data", [3])
    assert "boxes must be in another format" in incident.cause.explanation


def wrong_size(model: nn.Module, x: Tensor) -> Tensor:
    if len(x) == 8:
        raise ValueError("cannot do eight at once")
    return model(x).mean()


def wrong_always(model: nn.Module, x: Tensor) -> Tensor:
    (x - x.max()).log()  # -inf, which has nothing to do with it
    raise ValueError("an option is missing")


@pytest.mark.parametrize("loss_fn", [wrong_size, wrong_always])
def test_error_of_the_program_is_raised_as_it_is(loss_fn: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"eight|option"):
        investigate(Tiny(), loss_fn, batch())


@pytest.mark.parametrize("loss_fn", [index_made_of_nan, step_size_too_small, asserts_its_input])
def test_the_trainer_decides_the_same(make_trainer: Callable[..., Any], loss_fn: Callable[..., Any]) -> None:
    data = [torch.rand(8, 4) + 0.1 for _ in range(6)]
    data[2] = batch()
    result = make_trainer(Tiny(), loss_fn=loss_fn, train_data=data, config={"loop": {"max_epochs": 1}}).fit()
    assert [incident.step for incident in result.incidents] == [2]
    assert result.incidents[0].samples == [3]
    assert result.steps == 6


def test_the_trainer_raises_an_error_of_the_program(make_trainer: Callable[..., Any]) -> None:
    data = [torch.rand(8, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="option"):
        make_trainer(Tiny(), loss_fn=wrong_always, train_data=data, config={"loop": {"max_epochs": 1}}).fit()


def test_division_of_python_numbers() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * (1.0 / float(x.sum()))

    incident = incident_of(Tiny(), loss_fn, torch.zeros(4, 4))
    assert (incident.origin.name, incident.cause.label) == ("ZeroDivisionError", "division_by_zero")


def test_a_batch_of_one_under_batch_norm_is_advised_to_be_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    finding = investigate(model, lambda model, batch: model(batch).sum(), torch.randn(1, 3))
    assert finding.cause.label == "empty_reduction"
    assert "data.drop_last=true" in finding.fix
