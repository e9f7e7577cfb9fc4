"""The learning rate of a step: what the schedule says, and a scale on top of it that the schedule never sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import UsageError
from ..tensors.devices import is_host

_UNSCALED = nullcontext()
INTERVALS = ("step", "epoch")


def scaled_lr(optimizer: Optimizer, scale: float) -> AbstractContextManager[None]:
    """Inside, every parameter group has `scale` times its learning rate; afterwards exactly what it had before.

    A scheduler would overwrite (or compound) a lasting change of the groups, so there is none.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> with scaled_lr(sgd, 0.5):
    ...     sgd.param_groups[0]["lr"]
    0.05
    >>> sgd.param_groups[0]["lr"]
    0.1
    """
    return _UNSCALED if scale == 1.0 else _scaled(optimizer, scale)


@contextmanager
def _scaled(optimizer: Optimizer, scale: float) -> Iterator[None]:
    groups = [
        group for group in optimizer.param_groups if group.get("lr") is not None
    ]  # None: the optimizer finds its own rate
    scheduled = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = group["lr"] * scale
    try:
        yield
    finally:
        for group, lr in zip(groups, scheduled, strict=True):
            group["lr"] = lr


class Schedule:
    """A learning-rate scheduler (or None: the rate stays as it is) that is stepped once per committed step, or once per epoch.

    `ReduceLROnPlateau` is stepped by `step_with_metric` instead, once per evaluation.
    """

    is_ours = True
    """It is stepped here, once per committed step; a loop that is not ours steps it whenever it wants."""

    def __init__(self, optimizer: Optimizer, scheduler: Any = None, every: str = "step") -> None:
        if every not in INTERVALS:
            raise UsageError(f"a scheduler is stepped every {' or '.join(INTERVALS)}, not every {every!r}.")
        self.optimizer, self.scheduler, self.every = optimizer, scheduler, every
        self.is_stepped_elsewhere = False
        """Something else has stepped the scheduler too."""
        self._left_at: Any = None
        self.error: Exception | None = None
        """What the scheduler raised. The step before it is committed; no further one may begin."""

    @property
    def lrs(self) -> tuple[float, ...]:
        """The scheduled learning rate of each parameter group; 0.0 for one without. Reads from the device if it is a tensor there."""
        return self.lrs_given({})

    def lrs_given(self, known: Mapping[int, float]) -> tuple[float, ...]:
        """The same; those in `known` have reached the host already."""
        groups = enumerate(self.optimizer.param_groups)
        return tuple([known[i] if i in known else float(group.get("lr") or 0.0) for i, group in groups])

    def rates_on_device(self) -> dict[int, Tensor]:
        """Learning rates that are tensors on another device than the host, by the index of their group."""
        rates = ((index, group.get("lr")) for index, group in enumerate(self.optimizer.param_groups))
        return {index: lr.detach() for index, lr in rates if isinstance(lr, Tensor) and not is_host(lr.device)}

    @property
    def needs_metric(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step(self) -> None:
        """After a committed step. The weights have moved, so an error is kept in `error` and not raised."""
        if self.scheduler is not None and self.every == "step" and not self.needs_metric:
            self._step()

    def epoch_ended(self) -> None:
        """After the last step of an epoch; only a schedule over epochs moves."""
        if self.scheduler is not None and self.every == "epoch" and not self.needs_metric:
            self._step()

    def _step(self) -> None:
        count = getattr(self.scheduler, "last_epoch", None)
        if self._left_at is not None and count != self._left_at:
            self.is_stepped_elsewhere = True
        try:
            self.scheduler.step()
        except Exception as error:
            self.error = error
        self._left_at = getattr(self.scheduler, "last_epoch", None)

    def step_with_metric(self, metric: float) -> None:
        """After an evaluation; only a schedule that needs the metric moves."""
        if self.needs_metric:
            self.scheduler.step(metric)

    def failed_after(self, step: int) -> str:
        """The message for `error`."""
        return (
            f"the schedule {type(self.scheduler).__name__} failed after step {step}: {self.error}\n"
            f"To fix: make it for as many {self.every}s as the run takes (loop.max_{self.every}s); with every=epoch it is stepped "
            "once per epoch, with every=step after each step."
        )

    def state_dict(self) -> Any:
        """The scheduler's own state; None if there is no scheduler, or if it keeps no state."""
        return self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else None

    def load_state_dict(self, state: Any) -> None:
        """`state` None, of a run without a schedule: the scheduler stays as it was made."""
        self._left_at = None
        if self.scheduler is not None and state is not None:
            self.scheduler.load_state_dict(state)
