"""The step of a loop that runs forward and backward itself, built on the same `Step` as the trainer's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..core.verdict import Decision
from ..core.view import DeviceStep, FirstLoss, StepView
from ..distributed.agreement import RankState
from ..distributed.comm import Link
from ..distributed.machine import Machine
from ..optim.optimizers import OptimizerGroup
from ..precision.mixed import Precision
from ..step.exchange import AttemptWatch
from ..step.joint import JointExchange
from ..step.measurement import Measurement
from ..step.step import Step
from ..tensors.sharded import is_sharded


class HostedPrecision(Precision):
    """Two scalers: that of the loop, for the steps that the loop computes, and one of our own, for replays and repairs."""

    def __init__(self, name: str, device: torch.device, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(name, device, model)
        self._optimizers = optimizers
        self.host_scaler: GradScaler | None = None
        """The loop's, once it was seen."""
        self.is_ours = False
        """Forward and backward are made by us: a repair, a retry, `guard.run`."""

    @property
    def has_scaler(self) -> bool:
        return super().has_scaler if self.is_ours else self.host_scaler is not None

    @contextmanager
    def ours(self) -> Iterator[None]:
        before, self.is_ours = self.is_ours, True
        if self._scaler is not None and self.host_scaler is not None and not before:
            self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": self.host_scaler.get_scale()})
        try:
            yield
        finally:
            self.is_ours = before

    def unscale(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        if self.is_ours:
            return super().unscale(optimizer, parameters)
        scaler = self.host_scaler
        if scaler is None:
            return
        for each in self._optimizers:
            try:
                scaler.unscale_(each)
            except RuntimeError as error:  # the loop has done it, to clip the gradients
                if "already been called" not in str(error):
                    raise
        self._unscale_others(scaler, optimizer, parameters)

    def loss_scale(self) -> Tensor | None:
        if self.is_ours:
            return super().loss_scale()
        return None if self.host_scaler is None else self.host_scaler.scale(torch.ones((), device=self.device))

    def update_scale(self) -> None:
        if self.is_ours:
            super().update_scale()

    def keep_scale(self, scale: float) -> None:
        if self.is_ours:
            super().keep_scale(scale)

    def state_dict(self) -> dict[str, Any] | None:
        return {
            "ours": super().state_dict(),
            "host": None if self.host_scaler is None else self.host_scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state:
            super().load_state_dict(state["ours"])
            if self.host_scaler is not None and state["host"]:
                self.host_scaler.load_state_dict(state["host"])


class HostedStep(Step):
    _precision: HostedPrecision
    drives = False
    """The whole step is ours (`guard.run`): schedule and gradients are moved and cleared by us too."""
    sums_losses = False
    """The loop adds up the losses of a window where it does not divide each by their number."""
    moving: Callable[[], object] | None = None
    """What the loop has asked for, to be done when the step commits: its own `optimizer.step()`, or that of its scaler."""
    _to_learn: tuple[StepView, Decision] | None = None

    def __init__(self, *args: Any, precision: HostedPrecision, **kwargs: Any) -> None:
        self._precision = precision
        super().__init__(*args, precision=precision, **kwargs)

    def see_first_loss(self, loss: Tensor, window: Sequence[Any]) -> None:
        """Before the loop's first backward: guards look at the graph."""
        if self._first is not None:
            self._first = None
            first = FirstLoss(loss, self.model, self.optimizer, window, self.precision.name, self.auxiliary_modules)
            self.guards.inspect(first)

    def attempt(
        self, window: Sequence[Any], watch: AttemptWatch | None = None, divisor: int | None = None
    ) -> Measurement:
        return super().attempt(window, watch, 1 if self.sums_losses and divisor is None else divisor)

    def to_replay(self) -> tuple[nn.Module, Optimizer | None]:
        # A remedy that tries another precision makes torch forget the hooks by which the loop's DDP learns of a gradient.
        return super().to_replay() if self.exchange.world_size == 1 else (copy.deepcopy(self.model), None)

    def measure(
        self, window: Sequence[Any], losses: Sequence[Tensor], metrics: Sequence[dict[str, Any]]
    ) -> Measurement:
        if self._precision.is_ours and self.exchange.world_size > 1 and not is_sharded(self.model):
            for parameter in self.parameters:  # of a repair: the loop's own wrapper has not seen its backward
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad.div_(self.exchange.world_size))
        return super().measure(window, losses, metrics)

    def move(self) -> None:
        if self.moving is not None:
            self.moving()
        else:
            super().move()

    def learn(self, view: StepView, decision: Decision) -> None:
        if self.moving is None or not isinstance(self.optimizer, OptimizerGroup):
            super().learn(view, decision)
        else:  # the loop's other optimizers have not stepped yet
            self._to_learn = view, decision

    def learn_at_the_end(self) -> None:
        """When the loop has left the block of a committed step."""
        if self._to_learn is not None:
            learned, self._to_learn = self._to_learn, None
            super().learn(*learned)

    def advance(self, refused: Tensor | None = None) -> None:
        if self.drives:
            super().advance(refused)
        else:  # the loop moves its schedule and clears its gradients itself
            self.precision.update_scale()


class HostMachine(Machine):
    """The processes that a loop has set up itself."""

    def __init__(self, device: torch.device, rank_timeout_seconds: float) -> None:
        self.device = device
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self.rank, self.world_size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self.replicas = None
        self.link = None if is_alone else Link(self.rank, self.world_size, device, rank_timeout_seconds)

    def gradient_sync(self, model: nn.Module, sync: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def share(self, numbers: Tensor) -> Tensor:
        return numbers if self.link is None else torch.stack(self.link.gather(numbers)).mean(0)


class HostedExchange(JointExchange):
    """The loop exchanges the gradients. What the ranks know of each other's step is sent when all of it is computed."""

    def begin_attempt(self, step: Step, window: Sequence[Any]) -> None: ...

    def before_backward(self, *_: Any) -> None: ...

    def measured(
        self, step: Step, on_device: DeviceStep, losses: Sequence[Tensor], metrics: Sequence[Mapping[str, Any]]
    ) -> Measurement:
        self._numbers.begin_attempt()
        values = self._numbers.early_values(step, losses, metrics, on_device.window)
        self._numbers.send(self.run, RankState.STEP, values)
        return super().measured(step, on_device, losses, metrics)

    @contextmanager
    def session(self, step: Step) -> Iterator[None]:
        self._numbers.begin_run(step.guards)
        try:
            yield
        finally:
            self._machine.close()
