"""Optimizers of other libraries: with gradients of their own, without a learning rate, or with a state of another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class KeepsNotes(torch.optim.SGD):
    """Keeps notes on the parameters, and refuses a step unless its own `zero_grad` has cleared them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self.param_groups[0]["params"]:
            parameter.note = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if getattr(parameter, "note", None) is not None:
                raise ValueError("the gradients were not cleared")
            parameter.note = "used"
        super().step()


class FindsItsRate(torch.optim.SGD):
    """Its learning rate is None: it finds one itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.01 * parameter.grad)


class Wrapper(torch.optim.SGD):
    """Its state is under names of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "slow": {"weight": torch.ones(2)}}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["inner"])


@pytest.mark.parametrize(
    "make", [lambda p: KeepsNotes(p, lr=0.1), FindsItsRate, lambda p: Wrapper(p, lr=0.1, momentum=0.9)]
)
def test_it_trains_and_survives_a_bad_batch(
    make_trainer: Callable[..., Any], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = nn.Linear(4, 2)
    data = [torch.rand(8, 4) for _ in range(8)]
    data[3][2] = float("nan")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    config = {"loop": {"max_epochs": 1}}
    result = make_trainer(
        model, loss_fn=loss_fn, train_data=data, optimizer=make(model.parameters()), config=config
    ).fit()
    assert (result.steps, [incident.samples for incident in result.incidents]) == (8, [[2]])
