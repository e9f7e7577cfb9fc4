"""`safetrain replay`: run the step of an incident again."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import NonFiniteError, SafetrainError, UsageError
from .bars import progress_bar
from .flags import load
from .main import EXIT_CHECK_FAILED, EXIT_USER_EXCEPTION
from .user_errors import show_user_error

if TYPE_CHECKING:
    from ..config import Config
    from ..incidents.bundle import Bundle
    from ..incidents.replay import Replayed
    from ..incidents.trust import Trust
    from ..trainer.trainer import SafeTrainer


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]...")
@click.option("--trust", "trusted", is_flag=True, help="Import whatever the run's config names, from anywhere.")
@click.option("--device", metavar="NAME", help="auto, cpu, cuda, … instead of the run's.")
@click.option("--no-remedies", is_flag=True, help="Only find the operation, try nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(
    bundle: Path, overrides: tuple[str, ...], trusted: bool, device: str | None, no_remedies: bool, as_json: bool
) -> int:
    """Run the step of an incident again.

    With the same batch, random state and weights. Nothing is trained or changed. BUNDLE is a directory like RUN/incidents/step-000042; the model is built from RUN/config.yaml. What is loaded can run
    nothing, and code that the config names is imported only if it belongs to the current project (it lies below the current
    directory and did not come with the run), to the layers, losses and optimizers of torch, or to the recipes of safetrain. For
    anything else, look at it first and add --trust.

    \b
    Examples:
      safetrain replay runs/first/incidents/step-000042
      safetrain replay runs/first/incidents/step-000042 --device cpu
      safetrain replay downloads/run/incidents/step-000007 --trust
      safetrain replay runs/x/incidents/step-000003 model._target_=./net.py:Net loss._target_=./net.py:loss

    \b
    Exit codes:
      0 reproduced as recorded          1 exception in your code   2 usage or config
      3 not reproduced, or different
    """
    from ..incidents.bundle import read_bundle
    from ..incidents.trust import Trust

    kept = read_bundle(bundle)
    config = config_of(kept, overrides, device)
    trust = Trust.of_bundle(kept, trusted, _typed_targets(kept, config, overrides))
    try:
        with progress_bar(f"replaying step {kept.incident.step}"):
            replayed = _replay(kept, config, trust, not no_remedies)
    except Exception as error:
        if isinstance(error, SafetrainError) and not isinstance(error, NonFiniteError):
            raise
        show_user_error(error, "while the step was built and replayed")
        return EXIT_USER_EXCEPTION
    _report(kept, replayed, as_json)
    return 0 if replayed.verdict == "reproduced" else EXIT_CHECK_FAILED


def config_of(bundle: Bundle, overrides: tuple[str, ...], device: str | None) -> Config:
    from ..core.rundir import CONFIG

    path = bundle.run_dir / CONFIG
    if not path.is_file():
        raise UsageError(
            f"{path} is missing, and the model is built from it.\n"
            "To fix: keep the bundle in its run (RUN/incidents/step-000042), and copy the whole run when you move it."
        )
    # A replay needs the model, the loss and the optimizer, and must not depend on the rest: nor on the environment it is read from.
    unneeded = ("data.train=null", "data.eval=null", "data.collate_fn=null", "scheduler=null", "guards=null")
    config = load(str(path), (*overrides, *unneeded), device=device).config
    config.guards = {}
    config.recovery, config.logging = type(config.recovery)(), type(config.logging)()
    config.loop.compile, config.loop.ema, config.loop.max_epochs = False, None, 1
    return config


def _typed_targets(bundle: Bundle, config: Config, overrides: tuple[str, ...]) -> set[str]:
    """Targets that the user named on the command line, and the run did not."""
    from ..incidents.trust import targets_in

    if not any("_target_" in override for override in overrides):
        return set()
    recorded = config_of(bundle, (), None)
    return set(targets_in(dataclasses.asdict(config))) - set(targets_in(dataclasses.asdict(recorded)))


def _replay(bundle: Bundle, config: Config, trust: Trust, remedies: bool) -> Replayed:
    from ..forensics import Effort
    from ..incidents.replay import replay

    trainer, import_class = built(bundle, config, trust)
    parts = trainer.model, trainer.training_step, trainer.optimizer
    effort = Effort(remedies, max_seconds=config.forensics.max_seconds)
    return replay(bundle, *parts, effort, import_class, trainer.auxiliary_modules())


def built(bundle: Bundle, config: Config, trust: Trust) -> tuple[SafeTrainer, Callable[[str], Any]]:
    """The trainer of a bundle's run, without its data; and what imports the classes of its batch, if they are trusted."""
    from ..config import import_target
    from ..trainer.trainer import SafeTrainer
    from .fit import _trainer_class

    trust.check(dataclasses.asdict(config))
    cls = _trainer_class(config, SafeTrainer)
    _check_complete(cls, SafeTrainer, config, bundle)
    trainer = cls(config=config, train_data=[bundle.contents["window"]])

    def import_class(target: str) -> Any:
        if not trust.allows_in_batch(target):
            raise UsageError(
                f"the batch holds objects of {target}, which is not a class of the current project and was not imported.\n"
                "To fix: run the command in the project's directory, or look at that code and add --trust."
            )
        found = import_target(target)
        if not inspect.isclass(found):
            raise UsageError(f"the batch names {target}, which is not a class.\nTo fix: get the bundle again.")
        return found

    return trainer, import_class


def _check_complete(cls: type[SafeTrainer], base: type[SafeTrainer], config: Config, bundle: Bundle) -> None:
    missing = []
    if config.model is None and cls.build_model is base.build_model:
        missing.append("model")
    if config.loss is None and cls.training_step is base.training_step:
        missing.append("loss")
    if missing:
        given = " ".join(f"{name}._target_=./file.py:{name.title()}" for name in missing)
        raise UsageError(
            f"the config of this run names no {' and no '.join(missing)}: the trainer was given them in Python.\n"
            f"To fix: say where they are: safetrain replay {bundle.directory} {given}\n"
            "or replay it in Python:\n"
            "  from safetrain.bundle import read_bundle\n"
            "  from safetrain.replaying import replay\n"
            f'  print(replay(read_bundle("{bundle.directory}"), model, loss_fn, optimizer).incident.render())'
        )


def _report(bundle: Bundle, replayed: Replayed, as_json: bool) -> None:
    from ..core.files import to_json
    from .blocks import say, show

    if as_json:
        fields = {"verdict": replayed.verdict, "differences": replayed.differences, "notes": replayed.notes}
        click.echo(to_json({**fields, "incident": replayed.incident.to_dict()}))
        return
    title = f"REPLAY of step {bundle.incident.step}: {replayed.verdict}"
    style = "green" if replayed.verdict == "reproduced" else "yellow"
    found = replayed.incident
    if found.was_investigated:
        show(found, title, style)
    else:
        say(title, style)
        is_same = found.replay.bitwise is True
        say(f"  {found.decision.reasons[0]}{', and its loss is the recorded one, bit for bit' if is_same else ''}")
    for difference in replayed.differences:
        say(f"  different: {difference}")
    for note in replayed.notes:
        say(f"  note: {note}")
