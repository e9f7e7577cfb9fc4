"""`safetrain fit`: train what a config describes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._private.allocator import keep_freed_memory
from ..core import containment
from ..distributed.launch import end_with_launcher, record_failure
from ..errors import ConfigError, NonFiniteError, SafetrainError
from .flags import config_arguments
from .main import ARGUMENTS, EXIT_INCIDENTS, EXIT_USER_EXCEPTION
from .user_errors import show_user_error

if TYPE_CHECKING:
    from ..config import Config, LoadedConfig
    from ..core.result import FitResult
    from ..trainer.trainer import SafeTrainer


RESTARTS = "After a fault (a killed process, a hang, an error) go on from the newest checkpoint, up to N times."


@click.command()
@config_arguments
@click.option("--out", metavar="DIR", type=click.Path(file_okay=False), help="Run directory; must not hold a run yet.")
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    default="never",
    help="auto: continue the run in --out if there is one, else start it. For jobs that are restarted automatically.",
)
@click.option("--nproc", metavar="N", type=click.IntRange(1), default=1, help="Processes on this machine.")
@click.option("--restarts", metavar="N", type=click.IntRange(0), default=0, help=RESTARTS)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "json_lines", is_flag=True, help="Print the journal's lines instead of progress.")
@click.option(
    "--strict", is_flag=True, help="Exit with code 5 after any incident, and raise what safetrain's own parts raise."
)
def command(
    loaded: LoadedConfig,
    out: str | None,
    resume: str,
    nproc: int,
    restarts: int,
    quiet: bool,
    json_lines: bool,
    strict: bool,
) -> int:
    """Train what CONFIG, a file or a recipe's name, describes.

    \b
    Examples:
      safetrain fit quickstart
      safetrain fit my.yaml --out runs/first --seed 1
      safetrain fit my.yaml optimizer.lr=1e-4 'data.train.sizes=[1,2]'
      safetrain fit my.yaml guards.clip.mode=norm ~guards.backoff
      safetrain fit my.yaml --out runs/first --resume auto
      safetrain fit my.yaml --nproc 4 --restarts 3

    \b
    Exit codes:
      0 done   1 exception in your code   2 usage or config   4 stopped by a guard
      5 incidents under --strict          130, 143 interrupted, state saved
    """
    if quiet and json_lines:
        raise click.UsageError("--quiet and --json exclude each other")
    if resume == "auto" and out is None:
        raise click.UsageError("--resume auto needs --out DIR: the run to continue is looked for there")
    if nproc > 1 or restarts:
        from ..core.rundir import create_run_dir, holds_run

        going_on = resume == "auto" and out is not None and holds_run(out)
        run_dir = Path(out) if going_on and out else create_run_dir(out, loaded.config.name)
        return in_processes(nproc, run_dir, restarts)
    return train_and_report(loaded.config, out, strict, "auto" if resume == "auto" else False)


def in_processes(num_processes: int, run_dir: Path, restarts: int = 0) -> int:
    """Run this same command in several processes, which all get the run directory."""
    from ..distributed.launch import launch, without_option

    given: list[str] = click.get_current_context().meta[ARGUMENTS]
    arguments = without_option(without_option(given, "--nproc"), "--restarts")
    if arguments[0] == "fit":
        arguments = [*without_option(arguments, "--out"), "--out", str(run_dir)]
        if restarts:
            arguments = [*without_option(arguments, "--resume"), "--resume", "auto"]
    return launch(arguments, num_processes, run_dir, lambda text: click.echo(text, err=True), restarts)


def train_and_report(config: Config, out: str | None, strict: bool, resume: bool | str = False) -> int:
    """Train; returns the exit code, and says where an exception of the user's code came from."""
    # Exceptions are handled here and not by click, which would take an EOFError of a data set for Ctrl-D.
    progress = Progress()
    end_with_launcher()
    containment.strict = containment.strict or strict
    try:
        result = progress.train(config, out, resume)
    except Exception as error:
        # A check that user code calls is an exception of user code.
        if isinstance(error, SafetrainError) and not isinstance(error, NonFiniteError):
            raise
        show_user_error(error, progress.stage, progress.resumable)
        record_failure(error, EXIT_USER_EXCEPTION)
        return EXIT_USER_EXCEPTION
    finally:
        progress.leave_process_group()
    return EXIT_INCIDENTS if strict and result.incidents else 0


class Progress:
    """Runs the stages of a training, and keeps track of the current one."""

    def __init__(self) -> None:
        self._stage = "while torch was imported"
        self.trainer: SafeTrainer | None = None

    @property
    def stage(self) -> str:
        """For the end of a sentence that begins with `raised`."""
        if self.trainer is None:
            return self._stage
        return f"while training, at step {self.trainer.step}" if self.trainer.has_run else "before the first step"

    @property
    def resumable(self) -> Path | None:
        """The directory of the run, if it has something to resume from."""
        run = self.trainer.run if self.trainer is not None and self.trainer.has_run else None
        is_saved = run is not None and self.trainer is not None and self.trainer.config.checkpoint.enabled
        return run.result.run_dir if run is not None and is_saved and run.result.steps > 0 else None

    def train(self, config: Config, out: str | None, resume: bool | str = False) -> FitResult:
        from ..trainer.trainer import SafeTrainer

        self._stage = "while the trainer's own module was imported"
        cls = _trainer_class(config, SafeTrainer)
        if config.loop.keep_memory and _is_on_cpu(config.loop.device):
            keep_freed_memory()
        self._stage = "while the model, the data and the optimizer were built"
        self.trainer = cls(config=config, run_dir=out)
        return self.trainer.fit(resume)

    def leave_process_group(self) -> None:
        """One that is still open would warn, or hang, when the process ends."""
        if self.trainer is not None and self.trainer.machine.world_size > 1:
            from ..distributed.machine import leave_process_group

            leave_process_group()


def _is_on_cpu(device: str) -> bool:
    import torch

    return device == "cpu" or (device == "auto" and not torch.accelerator.is_available())


def _trainer_class(config: Config, base: type[SafeTrainer]) -> type[SafeTrainer]:
    if config.trainer is None:
        return base
    from ..config import import_target

    target: str = config.trainer["_target_"]
    cls: Any = import_target(target)
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ConfigError(f"trainer._target_: {target} is not a SafeTrainer; derive it from safetrain.SafeTrainer")
    return cls
