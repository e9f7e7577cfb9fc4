"""Captures and restores everything that checking a trainer may disturb."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.belongings import Belongings
from ..tensors.devices import wide
from ..tensors.rng import RandomState
from ..tensors.saved import Captured

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer


class Untouched:
    """`rewind()`: everything is as before the first step, and without gradients. `leave()`: everything is as it was found.

    Costs a copy of the parameters, the buffers and the optimizer's state.
    """

    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        self._random = RandomState.capture()
        modules = list(
            dict.fromkeys(m for root in (trainer.model, *trainer.auxiliary_modules()) for m in root.modules())
        )
        parameters = {id(p): p for p in trainer.stepper.parameters}
        parameters |= {id(p): p for module in modules for p in module.parameters(recurse=False)}
        self._parameters = [(p, p.data, p.data.clone(), p.grad) for p in parameters.values()]
        buffers = [b for module in modules for b in module._buffers.values() if b is not None]
        self._buffers = [(b, b.detach().clone()) for b in {id(b): b for b in buffers}.values()]
        self._optimizer = Captured([vars(trainer.optimizer)])
        self._scaler = copy.deepcopy(trainer.precision.state_dict())
        known = [*parameters.values(), *buffers, trainer.evaluation]  # nothing is evaluated
        self._belongings = Belongings([*_parts(trainer), *modules], known)

    @torch.no_grad()
    def rewind(self, everything: bool = False) -> None:
        """`everything`: also large arrays that the model, the loss or the data hold."""
        self._belongings.restore(everything)
        for parameter, data, value, _ in self._parameters:
            if parameter.data.data_ptr() != data.data_ptr():
                parameter.data = data
            parameter.data.copy_(value)
            parameter.grad = None
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._optimizer.restore()
        if self._scaler:
            self._trainer.precision.load_state_dict(copy.deepcopy(self._scaler))
        self._random.restore()

    @torch.no_grad()
    def weight_change(self) -> float:
        """How far the weights have moved since, relative to their size; Inf if they are not finite."""
        moved = sum(float(wide(p.data - value).square().sum()) for p, _, value, _ in self._parameters if _is_real(p))
        size = sum(float(wide(value).square().sum()) for p, _, value, _ in self._parameters if _is_real(p))
        change = math.sqrt(moved / size) if size > 0 and math.isfinite(moved) else math.inf
        return change if moved > 0 or size > 0 else 0.0

    def leave(self) -> None:
        self.rewind(everything=True)
        for parameter, _, _, gradient in self._parameters:
            parameter.grad = gradient


def _is_real(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.element_size() > 1


def _parts(trainer: SafeTrainer) -> list[Any]:
    """What a training step of the user's can reach: first of all the trainer, with what a subclass adds to it."""
    step = trainer.stepper
    parts = [step, step.history, step.schedule, step.precision, step.guards, *step.guards, trainer.stream]
    return [trainer, *parts, trainer.loss_fn, trainer.scheduler, vars(trainer.optimizer), trainer.stream.source]
