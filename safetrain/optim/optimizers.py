"""AdamW and SGD with fused kernels where torch has them, and several optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import LBFGS, SGD, AdamW, Optimizer

from ..errors import UsageError
from .build import fused_where_supported


def adamw(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> AdamW:
    """`torch.optim.AdamW` with its fused kernel where torch has one for these parameters, as a config's `torch.optim.AdamW` is built.

    >>> adamw(torch.nn.Linear(2, 1).parameters(), lr=0.1).defaults["fused"]
    True
    >>> adamw(torch.nn.Linear(2, 1, dtype=torch.complex64).parameters(), lr=0.1).defaults["fused"]
    """
    options = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    made: AdamW = fused_where_supported(AdamW, params, lr=lr, **options)
    return made


def sgd(
    params: Iterable[Any],
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> SGD:
    """`torch.optim.SGD`, in the same way as `adamw`."""
    options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
    made: SGD = fused_where_supported(SGD, params, lr=lr, **options)
    return made


class OptimizerGroup(Optimizer):
    """Optimizers of different parameters that step together, so that a step of the trainer commits for all or for none.

    It owns their parameter groups (each has its optimizer's name under `optimizer`) and their state: learning-rate schedules,
    backoff, checkpoints and audits act on all of them. A parameter without a gradient in a step is left alone, so a part
    whose loss was left out of the step's loss does not move.

    >>> g, d = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    >>> group = OptimizerGroup(
    ...     generator=torch.optim.Adam(g.parameters(), lr=1e-4), discriminator=torch.optim.SGD(d.parameters(), lr=1e-2)
    ... )
    >>> [(g["optimizer"], g["lr"]) for g in group.param_groups]
    [('generator', 0.0001), ('discriminator', 0.01)]
    """

    def __init__(self, **optimizers: Optimizer) -> None:
        if not optimizers:
            raise UsageError("there is no optimizer in the group.\nTo fix: OptimizerGroup(name=optimizer, …).")
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
                raise UsageError(
                    f"{name} is a {type(optimizer).__name__}, which cannot be part of a group.\n"
                    "To fix: give first-order optimizers such as torch.optim.AdamW."
                )
            for group in optimizer.param_groups:
                group["optimizer"] = name
        self.optimizers = dict(optimizers)
        self._sizes = {name: len(optimizer.param_groups) for name, optimizer in optimizers.items()}
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        super().__init__(groups, {})  # raises ValueError if two of them share a parameter
        for optimizer in optimizers.values():
            self.state.update(optimizer.state)
        self._hand_out()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers, "_sizes": self._sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hand_out()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of all of them, as of one optimizer with all the parameter groups."""
        super().load_state_dict(dict(state_dict))
        self._hand_out()

    def _hand_out(self) -> None:
        """Each optimizer works on its part of the groups, and all of them on one state: their parameters are different."""
        groups = iter(self.param_groups)
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups = [next(groups) for _ in range(self._sizes[name])]
            optimizer.state = self.state
