"""AdamW and SGD with fused kernels where torch has them, and several optimizers as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
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

    Its parameter groups (each has its optimizer's name under `optimizer`) and its state are those of the optimizers in it:
    learning-rate schedules, backoff, checkpoints and audits act on all of them. A parameter without a gradient in a step is
    left alone, so a part whose loss was left out of the step's loss does not move.

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
        seen: set[int] = set()
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
                raise UsageError(
                    f"{name} is a {type(optimizer).__name__}, which cannot be part of a group.\n"
                    "To fix: give first-order optimizers such as torch.optim.AdamW."
                )
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if seen & own:
                raise ValueError("some parameters appear in more than one parameter group")
            seen |= own
            for group in optimizer.param_groups:
                group["optimizer"] = name
        super().__setstate__({"defaults": {}, "optimizers": dict(optimizers)})

    optimizers: dict[str, Optimizer]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property  # type: ignore[override]
    def state(self) -> JoinedState:
        return JoinedState(self.optimizers.values())

    @state.setter
    def state(self, new: Mapping[Any, Any]) -> None:
        for optimizer in self.optimizers.values():
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            optimizer.state = defaultdict(dict, {key: value for key, value in new.items() if key in own})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError("a group of parameters belongs to one of the optimizers.\nTo fix: add it to that optimizer.")

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy: `optimizers`. Of `load_state_dict`: the state of all of them, as of one with all the parameter groups."""
        if "optimizers" in state:
            super().__setstate__(state)
            return
        groups = iter(state["param_groups"])
        for optimizer in self.optimizers.values():
            own = [next(groups) for _ in optimizer.param_groups]
            members = {parameter for group in own for parameter in group["params"]}
            values = {key: value for key, value in state["state"].items() if key in members}
            optimizer.__setstate__({"state": defaultdict(dict, values), "param_groups": own})


class JoinedState(MutableMapping[Any, Any]):
    """The states of several optimizers, which stay in them."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._states = {
            parameter: optimizer.state
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: Any) -> Any:
        return self._states[parameter][parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._states[parameter][parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._states[parameter][parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._states and parameter in self._states[parameter]

    def get(self, parameter: Any, default: Any = None) -> Any:
        if parameter not in self:  # asking an optimizer's own state would add an entry
            return default
        return self[parameter]

    def __iter__(self) -> Iterator[Any]:
        return iter([parameter for parameter in self._states if parameter in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)
