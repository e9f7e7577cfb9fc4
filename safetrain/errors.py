"""Every exception safetrain raises on purpose.

    SafetrainError
    ├── ConfigError           a config or a command-line argument is wrong        exit code 2
    ├── UsageError            the trainer was called or subclassed wrongly         exit code 2
    │   ├── DataError         the data given cannot be trained on
    │   └── LossError         training_step returned something that is not a loss
    ├── RunDirectoryError     the run directory cannot be used                     exit code 2
    │   └── CheckpointError   a checkpoint cannot be written, or none can be loaded
    ├── NonFiniteError        a check in user code found NaN or Inf                exit code 1
    ├── TrainingStopped       a guard stopped the run; has .incident and .result   exit code 4
    └── Interrupted           SIGINT or SIGTERM; the step was finished and saved   exit code 130, 143

Exceptions raised by user code (a model's forward, a data set) are never wrapped: they pass through with their own traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .incident import Incident
    from .result import FitResult


class SafetrainError(Exception):
    """Base of all errors below."""


class ConfigError(SafetrainError):
    """One or more problems in a config; `problems` holds one string each."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))


class UsageError(SafetrainError, ValueError):
    """The trainer was given something it cannot work with; the message ends with what to do."""


class DataError(UsageError):
    """The data cannot be trained on: empty, exhausted, or without tensors."""


class LossError(UsageError):
    """`training_step` or `loss_fn` returned something that is not a differentiable scalar."""


class RunDirectoryError(SafetrainError):
    """The run directory already holds a run, or cannot be written."""


class CheckpointError(RunDirectoryError):
    """A checkpoint cannot be written, cannot be loaded, or does not fit; the ones that exist are left as they are."""


class NonFiniteError(SafetrainError, FloatingPointError):
    """`safe.check_tensor` or `safe.check_gradients` found NaN or Inf; the message says how many, where, and in what."""


class TrainingStopped(SafetrainError):
    """A guard stopped the run. Nothing of the refused step was applied."""

    def __init__(self, incident: Incident, result: FitResult) -> None:
        super().__init__(incident.headline())
        self.incident = incident
        self.result = result


class Interrupted(SafetrainError):
    """A signal ended the run after the step in progress."""

    def __init__(self, signum: int, result: FitResult) -> None:
        super().__init__(f"interrupted by signal {signum} after {result.steps} committed steps")
        self.signum = signum
        self.result = result
