"""An optimizer's step in less time, with the same bits.

The step is the function that torch has wrapped, and is called alone when nobody listens. For Adam and AdamW on a CPU it is that
of `PackedAdam`. For others torch goes from tensor to tensor in Python there. Its multi-tensor form (`foreach`) runs the same
kernels on the same tensors in a fifth to two fifths less time, as long as they stay in a core's cache; with more of them it takes up
to twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._private.torch_optim import quiet_step
from ..tensors.copies import Joined
from .packed_adam import PackedAdam, can_pack

_SAME_AT_ONCE = {torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD}
"""Optimizers whose multi-tensor form gives the same bits on a CPU. NAdam, RAdam and ASGD round differently, and half precision does."""
_FULL = (torch.float32, torch.float64)
_FEW_ELEMENTS = 2**18


class Stepper:
    """Makes the steps of an optimizer, whose state may be replaced, and which may be given more parameters, at any time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._packed = PackedAdam(optimizer) if can_pack(optimizer) else None
        self._sizes: list[int] = []
        """Parameters of each group when it was last looked at which are small."""
        self._at_once: list[int] = []
        self._listeners: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def listen(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Have these called around each step, until the function that is returned was called. Unlike a hook of the optimizer
        that does not keep the step from being a fast one."""
        self._listeners.append(listener := (before, after))
        return lambda: self._listeners.remove(listener)

    def step(self, joined_before: Joined | None = None) -> None:
        """What `optimizer.step()` does; by that very call if anything listens to it, or has taken its place. `joined_before`: the
        gradients, if somebody has joined them already."""
        if not self._listeners:
            self._step(joined_before)
            return
        listeners = list(self._listeners)
        for before, _ in listeners:
            before()
        self._step(joined_before)
        for _, after in listeners:
            after()

    def _step(self, joined_before: Joined | None) -> None:
        alone = quiet_step(self.optimizer)
        if alone is not None and self._packed is not None and self._packed.step(joined_before):
            return
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != self._sizes:
            self._sizes, self._at_once = sizes, _small_groups(self.optimizer)
        groups = (self.optimizer.param_groups[index] for index in self._at_once)
        chosen = [group for group in groups if _leaves_form_open(group)]
        for group in chosen:
            group["foreach"] = True
        try:
            if alone is None:
                self.optimizer.step()
            else:
                alone(self.optimizer)
        finally:
            for group in chosen:
                group["foreach"] = None


def _small_groups(optimizer: Optimizer) -> list[int]:
    """Indices of the parameter groups that take the multi-tensor form, where the user has not chosen one."""
    if type(optimizer) not in _SAME_AT_ONCE:
        return []
    return [index for index, group in enumerate(optimizer.param_groups) if _is_small(group["params"])]


def _is_small(parameters: Sequence[torch.Tensor]) -> bool:
    if len(parameters) < 2 or sum(p.numel() for p in parameters) > _FEW_ELEMENTS:
        return False
    if not all(type(p) is nn.Parameter and p.device.type == "cpu" and p.dtype in _FULL for p in parameters):
        return False
    # Where two share memory, the order matters.
    return len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)


def _leaves_form_open(group: dict[str, Any]) -> bool:
    if group.get("foreach", False) is not None or group.get("fused") or group.get("differentiable"):
        return False
    return not (
        group.get("capturable") or any(isinstance(v, torch.Tensor) for v in (group["lr"], *group.get("betas", ())))
    )
