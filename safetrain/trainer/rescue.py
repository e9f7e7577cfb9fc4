"""A device that fails permanently during a run: nothing on it can be read any more, and the state in host memory is
saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..checkpoint.policy import CheckpointPolicy
from ..errors import DeviceLost, SafetrainError
from ..step.step import Step
from ..tensors.devices import still_works


@contextmanager
def rescuing(step: Step, checkpoints: CheckpointPolicy) -> Iterator[None]:
    """Around the steps of a run: an error after which the device no longer works becomes `DeviceLost`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetrainError) or still_works(step.device):
            raise
        raise DeviceLost(_message(step, error, checkpoints.rescue())) from error


def _message(step: Step, error: Exception, saved: str) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{step.device} no longer works: {first}. Its errors arrive late: the cause is step {step.index} or shortly before it.\n{saved}.\n"
        "To fix: look for an index or a label out of range that the step computes itself (those that come with a batch are looked at "
        "before). On the CPU the same step raises an ordinary exception with its line: run it with loop.device=cpu. Then go on with "
        "safetrain resume in a new process."
    )
