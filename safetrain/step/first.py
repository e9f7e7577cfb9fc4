"""Checks once, in the first step of a process, whether the loss can train the model at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..core.loss import check_no_backward, check_reached
from ..core.view import FirstLoss

if TYPE_CHECKING:
    from .step import Step


class FirstStep:
    def __init__(self, step: Step) -> None:
        self._step = step

    def check_forward(self, loss: Tensor, window: Sequence[Any]) -> None:
        """Between forward and backward. The guards see the graph of the loss."""
        step = self._step
        check_no_backward(step.parameters)
        step.guards.inspect(
            FirstLoss(loss, step.model, step.optimizer, window, step.precision.name, step.auxiliary_modules)
        )

    def check_backward(self) -> FirstStep | None:
        """After the first backward pass. Returns what is left to be looked at in later steps: nothing."""
        check_reached(self._step.optimizer)
        return None
