"""Communication of a step with the other ranks: before the step, after its last forward, and before a refusal.

`Exchange` is the one for a process without other ranks: there is nothing to exchange. `joint.JointExchange` is the one for many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, nn

from ..core.verdict import Decision
from ..core.view import DeviceStep, StepView
from ..distributed.watchdog import Watchdog
from ..errors import SafetrainError
from .measurement import Measurement

if TYPE_CHECKING:
    from .step import Step

T = TypeVar("T")
_NOTHING = nullcontext()


class RunStatus(Protocol):
    """What ranks must know of each other's run at each step."""

    @property
    def signal(self) -> int | None:
        """The signal that asked this process to end, if one did."""

    @property
    def out_of_time(self) -> bool:
        """`loop.max_hours` have passed in this process."""

    @property
    def stop_reason(self) -> str | None:
        """Why this process asks the run to end in the ordinary way, if it does."""

    def trail(self) -> int:
        """A checksum of everything decided so far; equal on all ranks as long as they decide alike."""


class AttemptWatch(Protocol):
    """Follows an attempt from outside."""

    def forward(self, micro_batch: int) -> None:
        """Before the forward of this micro-batch."""

    def backward(self, loss: Tensor) -> None:
        """Before its backward, with its detached loss."""


class Exchange:
    rank = 0
    world_size = 1
    run: RunStatus
    """Set when a run begins."""
    failed_together = False
    """Some rank raised in the last attempt, and all know it."""

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.watchdog = Watchdog() if watchdog is None else watchdog

    # ---- what all ranks know -----------------------------------------------------------------------------------

    @property
    def signal(self) -> int | None:
        """The signal that asked the run, on any rank, to end."""
        return self.run.signal

    @property
    def out_of_time(self) -> bool:
        return self.run.out_of_time

    @property
    def is_stopping(self) -> bool:
        """Some rank asks the run to end in the ordinary way."""
        return self.run.stop_reason is not None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank. All ranks must call it; slow."""
        return [value]

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank; the same answer on all. Collective: every rank must call it."""
        return flag

    def mean(self, numbers: Tensor) -> Tensor:
        """Over all ranks, equal on each, in one collective. NaN or Inf on one rank becomes the result on all."""
        return numbers

    # ---- one step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a step: the buffers of rank 0 on every rank."""

    def begin_attempt(self, step: Step, window: Sequence[Any]) -> None:
        """Before the first forward. Raises an error left over from the previous attempt."""
        self.watchdog.activity.step = step.index

    def gradient_sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch: only the last backward exchanges gradients."""
        self.watchdog.activity.at("forward pass")
        return _NOTHING

    def before_backward(
        self,
        step: Step,
        losses: Sequence[Tensor],
        metrics: Sequence[Mapping[str, Any]],
        window: Sequence[Any],
        is_last: bool,
    ) -> None:
        """After the last forward: start sending this rank's numbers, without waiting."""
        self.watchdog.activity.at("backward pass")

    def stand_in(self, step: Step, error: Exception, window: Sequence[Any]) -> None:
        """This rank raised: take part in what the others still exchange. Raises, on all ranks, unless this rank has
        already reported a finished forward; its gradients are then NaN."""
        raise error

    def measured(
        self, step: Step, on_device: DeviceStep, losses: Sequence[Tensor], metrics: Sequence[Mapping[str, Any]]
    ) -> Measurement:
        """After backward: the numbers of the step over all ranks."""
        self.watchdog.activity.at("decision")
        signals = step.guards.measure(on_device)
        scale, rates = step.precision.loss_scale(), step.schedule.rates_on_device()
        return Measurement(losses, on_device.grad_norm, scale, signals, metrics, on_device.window, rates)

    def agree(self, step: Step, decision: Decision, view: StepView) -> Decision:
        """One decision for all ranks."""
        return decision

    # ---- when a rank raised ------------------------------------------------------------------------------------

    def may_be_refused(self, error: Exception) -> bool:
        """Whether an error of an attempt may be a refused step at all."""
        return not isinstance(error, SafetrainError)  # those say themselves what to do

    def explains(self, step: Step, view: StepView) -> bool:
        """Whether it was because of the step's numbers, on every rank that raised."""
        return step.explains(view)

    def is_abandoned(self, error: Exception) -> bool:
        """The run is to end, and some rank has no window for this step any more: the step is dropped."""
        return False

    # ---- around the steps --------------------------------------------------------------------------------------

    def no_window(self, error: Exception) -> list[Any]:
        """This rank's data raised; what to attempt instead of a window, so that all ranks learn of it."""
        raise error

    def end_of_epoch(self, step: Step) -> None:
        """This rank has no more data. Raises, on all ranks, if others have."""

    def warm_up(self, step: Step, window: Sequence[Any]) -> None:
        """Before the first step of a resumed run."""

    def replays_alone(self, model: nn.Module) -> bool:
        """Whether one rank can run the model without the others."""
        return True

    def may_replay_now(self, model: nn.Module) -> bool:
        """Also in the middle of an attempt, which others may not have ended yet."""
        return self.replays_alone(model)

    def own_loss(self, view: StepView) -> float | None:
        """Of this rank's window in the last step, bit for bit as it was computed; None if it had several micro-batches, whose mean
        is rounded in another way."""
        return view.loss if len(view.window()) == 1 else None

    def explained(self, error: BaseException) -> BaseException:
        """An error of the communication, as one that names the rank that is missing and where it is."""
        return error

    @contextmanager
    def alone(self, step: Step) -> Iterator[None]:
        """Inside, the step concerns this rank only, and the model is called without its wrapper."""
        yield

    @contextmanager
    def session(self, step: Step) -> Iterator[None]:
        """Around all steps of a run: however one rank ends, the others learn of it."""
        yield
