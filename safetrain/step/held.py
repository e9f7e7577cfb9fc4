"""Values that are held in each step because their computed update is non-finite in step after step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tensors.gradients import numbers_of
from ..tensors.sharded import local

if TYPE_CHECKING:
    from .step import Step


class Held:
    """False as long as nothing is held, which costs a step nothing. What is held is looked at on the host in every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        """The last good learning rate of each parameter group, once the schedule gave one that is not finite."""
        self.eps: dict[int, float] = {}
        """By parameter group: in place of one that is zero in half precision."""
        self.gradients: dict[str, bool] = {}
        """Parameters that get no update while their gradient is not finite; True: while it is zero."""
        self.buffers: list[str] = []
        """Buffers whose entries keep their values where they would become non-finite."""

    def __bool__(self) -> bool:
        return bool(self.rates or self.eps or self.gradients or self.buffers)

    @torch.no_grad()
    def apply(self, step: Step) -> None:
        """After backward, before anything is measured."""
        for group, rate in zip(step.optimizer.param_groups, self.rates, strict=False):
            if not math.isfinite(float(group.get("lr") or 0.0)):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        for index, eps in self.eps.items():
            step.optimizer.param_groups[index]["eps"] = eps
        if self.gradients:
            for name, parameter in step.model.named_parameters():
                if name in self.gradients and parameter.grad is not None:
                    is_useless = is_zero if self.gradients[name] else is_bad
                    parameter.grad = None if is_useless(parameter.grad) else parameter.grad
        if self.buffers:
            before = dict(step.transaction.buffers_before())
            for name, buffer in step.transaction.buffers_now():
                if name in self.buffers and name in before and before[name].shape == buffer.shape:
                    buffer.copy_(torch.where(torch.isfinite(buffer), buffer, before[name]))

    def state_dict(self) -> dict[str, Any]:
        eps, gradients = [list(item) for item in self.eps.items()], dict(self.gradients)
        return {"rates": list(self.rates), "eps": eps, "gradients": gradients, "buffers": list(self.buffers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates, self.buffers = list(state["rates"]), list(state["buffers"])
        self.eps, self.gradients = {int(index): float(eps) for index, eps in state["eps"]}, dict(state["gradients"])


def is_bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(numbers_of(local(tensor))).all())


def is_zero(tensor: Tensor) -> bool:
    return not bool(numbers_of(local(tensor)).any())
