"""What guards see of a step: on the device while it is measured, on the host when it is judged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Limits:
    """Bounds on the gradient that a guard asks for before the step; infinite means no bound.

    >>> Limits(norm=1.0).tightest(Limits(norm=0.5, value=2.0))
    Limits(norm=0.5, group_norm=inf, value=2.0)
    """

    norm: float = math.inf
    """Largest global L2 norm over all parameters."""
    group_norm: float = math.inf
    """Largest L2 norm of each optimizer parameter group on its own."""
    value: float = math.inf
    """Largest absolute value of each element."""

    def tightest(self, other: Limits) -> Limits:
        if self is UNBOUNDED:
            return other
        return Limits(min(self.norm, other.norm), min(self.group_norm, other.group_norm), min(self.value, other.value))

    @property
    def bounded(self) -> bool:
        return min(self.norm, self.group_norm, self.value) < math.inf


UNBOUNDED = Limits()


def tightest(limits: Iterable[Limits]) -> Limits:
    return functools.reduce(Limits.tightest, limits, UNBOUNDED)


@dataclass(frozen=True)
class DeviceStep:
    """A step after backward, before its numbers reached the host. Reading a value here would stall the device: don't.

    What `Guard.measure` returns travels to the host together with the loss and the gradient norm, in one transfer.

    >>> class Peak(Guard):  # refuses a step in which one element of the gradient is above 100
    ...     def measure(self, step: DeviceStep):
    ...         return {"largest": torch.stack([g.abs().max() for g in step.gradients]).max()}
    ...
    ...     def judge(self, view: StepView):
    ...         largest = view.signals.get("peak.largest", 0.0)
    ...         return Verdict() if largest <= 100 else Verdict(Action.SKIP, reason=f"a gradient of {largest:.3g}")
    """

    step: int
    loss: Tensor
    """Mean loss of the window, 0-d, detached."""
    grad_norm: Tensor
    """Global L2 norm of the unscaled gradient, before clipping."""
    gradients: Sequence[Tensor]
    buffer_peak: Callable[[], Tensor | None]
    """Largest absolute value over the model's buffers (NaN and Inf propagate); None when it has none."""
    state_peak: Callable[[], Tensor | None]
    """Largest absolute value over parameters and optimizer state, as they were before this step."""
    window: Sequence[Any] = ()
    """The micro-batches of the step."""


@dataclass(frozen=True)
class FirstLoss:
    """The first loss of a run, between its forward and its backward pass: the only time that guards see the graph."""

    loss: Tensor
    """With its graph."""
    model: nn.Module
    optimizer: Optimizer
    window: Sequence[Any]
    precision: str
    auxiliary_modules: Sequence[nn.Module] = ()
    """Modules that take part in the step without being part of the model."""


@dataclass(frozen=True)
class StepView:
    """A step's numbers on the host. Frozen: a guard that wants to remember something does so in `learn`.

    >>> view = StepView(step=7, loss=float("nan"), grad_norm=1.0, refused_steps=[3, 5])
    >>> view.in_trouble, view.refusals_within(3)
    (True, 1)
    """

    step: int
    """Index of this attempt, from 0; refused steps count, so `result.losses[step]` is this step's loss."""
    loss: float
    grad_norm: float
    """Before clipping. When the float32 norm overflowed, the true norm in float64 (see `norm_overflow`)."""
    lrs: Sequence[float] = (0.0,)
    """Scheduled learning rate of each parameter group, without any guard's scale."""
    limits: Limits = Limits()
    """Bounds that the gradient will be clipped to if the step commits."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """What the guards measured, by `guard.name`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that `training_step` returned with the loss."""
    micro_losses: Sequence[float] = ()
    """The loss of each micro-batch of the window."""
    refused_loss: float | None = None
    """If this attempt is to repair a refused one: the loss of that. None for a first attempt."""
    norm_overflow: bool = False
    """The float32 gradient norm is Inf although every gradient is finite."""
    scaler_overflow: bool = False
    """fp16 only: the loss is finite and the scaled gradients are not, which the loss scaler handles."""
    loss_scale: float = 1.0
    consecutive_overflows: int = 0
    """Scaler overflows in a row, this step included."""
    consecutive_refusals: int = 0
    """Refused steps directly before this one."""
    refused_steps: Sequence[int] = ()
    """The steps refused most recently (at most 1000), oldest first."""
    dynamics_steps: Sequence[int] = ()
    """Steps refused for reasons of training dynamics rather than data (at most 1000), oldest first."""
    rollback_steps: Sequence[int] = ()
    """Steps at which the run was rolled back (at most 1000), oldest first."""
    lr_shares: Mapping[int, float] = field(default_factory=dict)
    """By step of `dynamics_steps`: the share of the learning rate that was best when it was tried, where that is known."""
    num_restarts: int = 0
    """How often training was started again from the beginning."""
    restart_shares: Sequence[float | None] = ()
    """The share of the learning rate that was found for each of these restarts; None where none was tried."""
    total_steps: int | None = None
    """Steps that the run will take, if that is known."""
    bad_state: Callable[[], Mapping[str, str]] = dict
    """Names of non-finite parameters, optimizer state and buffers, with what is wrong. Reads the whole state: only call
    it when the step is already in trouble."""
    window: Callable[[], Sequence[Any]] = tuple
    """The micro-batches of the step, on the device. Nothing once the step is over: a view that is kept keeps no data."""
    epoch: int = 0
    """The epoch that its micro-batches come from."""
    error: Exception | None = None
    """What forward or backward raised, if a guard explained it; the loss and the gradient norm are then NaN."""

    @property
    def in_trouble(self) -> bool:
        """It raised, or its loss or gradient is not finite (an overflow that the fp16 scaler handles is no trouble)."""
        if self.error is not None or not math.isfinite(self.loss):
            return True
        return not (math.isfinite(self.grad_norm) or self.scaler_overflow)

    @property
    def update_size(self) -> float | None:
        """Norm of the update before this step, relative to the weights; None where it is not measured (the guard `spike` does)."""
        return self.signals.get("spike.update")

    @property
    def lr(self) -> float:
        """Scheduled learning rate of the first parameter group."""
        return self.lrs[0]

    def refusals_within(self, num_steps: int) -> int:
        """How many of the last `num_steps` steps before this one were refused."""
        return sum(1 for s in self.refused_steps if s >= self.step - num_steps)
