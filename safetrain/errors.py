"""Every exception safetrain raises on purpose.

    SafetrainError
    ├── ConfigError           a config or a command-line argument is wrong        exit code 2
    ├── UsageError            the trainer was called or subclassed wrongly         exit code 2
    │   ├── DataError         the data given cannot be trained on
    │   └── LossError         training_step returned something that is not a loss
    ├── RunDirectoryError     the run directory cannot be used                     exit code 2
    │   └── CheckpointError   a checkpoint cannot be written, or none can be loaded
    ├── NonFiniteError        a check in user code found NaN or Inf                exit code 1
    ├── RankError             another process of the run failed, or does not answer  exit code 1
    ├── HangError             a step, an evaluation or a save did not go on          exit code 1
    ├── DeviceLost            the device failed for good; what the host had is saved  exit code 1
    ├── TrainingStopped       a guard stopped the run; has .incident and .result   exit code 4
    └── Interrupted           SIGINT, SIGTERM, …; the step was finished and saved    exit code 128 + signal

Exceptions raised by user code (a model's forward, a data set) are never wrapped: they pass through with their own traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.incident import Incident
    from .core.result import FitResult


class SafetrainError(Exception):
    """Base of all errors below.

    >>> try:
    ...     load_config({"loop": {"max_step": 100}})
    ... except SafetrainError as error:
    ...     print(type(error).__name__)
    ConfigError
    """


class ConfigError(SafetrainError):
    """One or more problems in a config; `problems` holds one string each.

    >>> load_config({"loop": {"max_step": 100, "grad_accum": 0}})
    Traceback (most recent call last):
    safetrain.errors.ConfigError: 2 problems in the configuration:
      - dict: loop.grad_accum: 0 is out of range, give an integer ≥ 1
      - dict: loop.max_step: unknown key, did you mean 'max_steps'?
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the configuration:"
        super().__init__("\n".join([head, *(f"  - {p}" for p in self.problems)]))


class UsageError(SafetrainError, ValueError):
    """The trainer was given something it cannot work with; the message ends with what to do.

    >>> SafeTrainer(torch.nn.Linear(2, 1), train_data=[torch.ones(4, 2)], config=QUIET).fit()
    Traceback (most recent call last):
    safetrain.errors.UsageError: there is nothing to compute the loss with.
    To fix: pass loss_fn=…, set `loss` in the config, or define training_step in a subclass.
    """


class DataError(UsageError):
    """The data cannot be trained on: empty, exhausted, or without tensors.

    >>> SafeTrainer(torch.nn.Linear(2, 1), loss_fn=torch.nn.MSELoss(), train_data=[], config=QUIET).fit()
    Traceback (most recent call last):
    safetrain.errors.DataError: the training data is empty: it gave no batch in epoch 0.
    To fix: check the path and length of the data set; ...
    """


class LossError(UsageError):
    """`training_step` or `loss_fn` returned something that is not a differentiable scalar.

    >>> data = [torch.ones(4, 2)]
    >>> SafeTrainer(torch.nn.Linear(2, 1), loss_fn=lambda model, x: model(x), train_data=data, config=QUIET).fit()
    Traceback (most recent call last):
    safetrain.errors.LossError: training_step returned a loss of shape (4, 1); it must be a scalar.
    To fix: return loss.mean() or loss.sum().
    """


class RunDirectoryError(SafetrainError):
    """The run directory already holds a run, or cannot be written.

    >>> data, loss = [torch.ones(4, 2)], lambda model, x: model(x).mean()
    >>> first = SafeTrainer(torch.nn.Linear(2, 1), loss_fn=loss, train_data=data, config=QUIET, run_dir="runs/a").fit()
    >>> SafeTrainer(torch.nn.Linear(2, 1), loss_fn=loss, train_data=data, config=QUIET, run_dir="runs/a").fit()
    Traceback (most recent call last):
    safetrain.errors.RunDirectoryError: runs/a already holds a run ...
    """


class CheckpointError(RunDirectoryError):
    """A checkpoint cannot be written, cannot be loaded, or does not fit; the ones that exist are left as they are.

    >>> data, loss = [torch.ones(4, 2)], lambda model, x: model(x).mean()
    >>> once = SafeTrainer(torch.nn.Linear(2, 1), loss_fn=loss, train_data=data, config=QUIET, run_dir="runs/b").fit()
    >>> other = torch.nn.Linear(2, 3)
    >>> SafeTrainer(other, loss_fn=loss, train_data=data, config=QUIET, run_dir="runs/b").fit(resume=True)
    Traceback (most recent call last):
    safetrain.errors.CheckpointError: ...
    """


class NonFiniteError(SafetrainError, FloatingPointError):
    """`safe.check_tensor` or `safe.check_gradients` found NaN or Inf; the message says how many, where, and in what.

    >>> safe.check_tensor(torch.tensor([1.0, float("nan")]), "hidden")
    Traceback (most recent call last):
    safetrain.errors.NonFiniteError: hidden is not finite: 1 NaN of 2 values, shape (2,), float32, first bad index (1,) (nan), ...
    """


class RankError(SafetrainError, RuntimeError):
    """Another process of the run raised, is gone, or does not answer in time; the message says which, and where it is."""


class HangError(SafetrainError, TimeoutError):
    """What this process does has taken many times as long as usual, and longer than the limit of the config; raised where it hangs."""


class DeviceLost(SafetrainError, RuntimeError):
    """The device of the run failed for good (an index out of range inside a kernel, an illegal access): only a new process can use it."""


class TrainingStopped(SafetrainError):
    """A guard stopped the run. Nothing of the refused step was applied.

    >>> data, loss = [torch.ones(4, 2)] * 30, lambda model, x: model(x).mean() / 0
    >>> try:
    ...     SafeTrainer(torch.nn.Linear(2, 1), loss_fn=loss, train_data=data, config=QUIET).fit()
    ... except TrainingStopped as stopped:
    ...     print(stopped.incident.cause.label, "at step", stopped.incident.step, "of", stopped.result.attempted)
    division_by_zero at step 7 of 8
    """

    def __init__(self, incident: Incident, result: FitResult) -> None:
        super().__init__(incident.headline())
        self.incident = incident
        self.result = result


class Interrupted(SafetrainError):
    """A signal ended the run after the step in progress; `fit(resume=True)` goes on from there.

    >>> class Ended(SafeTrainer):
    ...     def on_commit(self, view):
    ...         if view.step == 2:
    ...             signal.raise_signal(signal.SIGTERM)
    >>> data, loss = [torch.ones(4, 2)] * 30, lambda model, x: model(x).mean()
    >>> Ended(torch.nn.Linear(2, 1), loss_fn=loss, train_data=data, config=QUIET).fit()
    Traceback (most recent call last):
    safetrain.errors.Interrupted: interrupted by signal 15 after 3 committed steps
    """

    def __init__(self, signum: int, result: FitResult) -> None:
        super().__init__(f"interrupted by signal {signum} after {result.steps} committed steps")
        self.signum = signum
        self.result = result
