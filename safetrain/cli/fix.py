"""`safetrain fix`: propose a change of the source that keeps an incident's step finite, proven on its replay."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import NonFiniteError, SafetrainError, UsageError
from .bars import progress_bar
from .main import EXIT_CHECK_FAILED, EXIT_USER_EXCEPTION
from .user_errors import show_user_error

if TYPE_CHECKING:
    from ..fixes import Proposal
    from ..incidents.bundle import Bundle
    from ..incidents.trust import Trust

NUM_OTHERS = 20
"""Batches of the data on which a change is compared."""


@click.command()
@click.argument("subject", metavar="INCIDENT|RUN", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]...")
@click.option("--apply", "applied", is_flag=True, help="Write the best change to the file.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Try for at most so long."
)
@click.option("--trust", "trusted", is_flag=True, help="Import whatever the run's config names, from anywhere.")
@click.option("--device", metavar="NAME", help="auto, cpu, cuda, … instead of the run's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(
    subject: Path,
    overrides: tuple[str, ...],
    applied: bool,
    seconds: float,
    trusted: bool,
    device: str | None,
    as_json: bool,
) -> int:
    """Propose a change of your source that keeps an incident's step finite.

    Forms of the blamed line, of the call into a library and of the lines where the fatal value was made are tried on a replay of
    the step. Proposed is what keeps it finite with a sensible loss, and leaves a healthy step as it was. Only your own source is
    changed, never an installed package, and only with --apply. Where the source is not what is wrong, a change of config or data is
    proposed. INCIDENT is a directory like RUN/incidents/step-000042; of a RUN, its newest incident that can be replayed.

    \b
    Examples:
      safetrain fix runs/first                              the newest incident
      safetrain fix runs/first/incidents/step-000042 --apply

    \b
    Exit codes:
      0 a change was proven          1 exception in your code          2 usage or config
      3 no change of the source was proven; what else to change is printed
    """
    from ..incidents.bundle import read_bundle
    from ..incidents.trust import Trust
    from .replay import config_of

    kept = read_bundle(_incident_of(subject))
    config = config_of(kept, overrides, device)
    try:
        with progress_bar(f"looking for a change that keeps step {kept.incident.step} finite"):
            trust = Trust.of_bundle(kept, trusted)
            others = _other_batches(kept, overrides, device, trust)
            found = _proposals(kept, config, trust, seconds, others)
    except Exception as error:
        if isinstance(error, SafetrainError) and not isinstance(error, NonFiniteError):
            raise
        show_user_error(error, "while the step was built and replayed")
        return EXIT_USER_EXCEPTION
    is_proven = bool(found) and found[0].kind == "source"
    if applied and is_proven:
        found[0].apply()
    _report(kept, found, applied and is_proven, as_json)
    return 0 if is_proven else EXIT_CHECK_FAILED


def _incident_of(subject: Path) -> Path:
    from ..incidents.bundle import INCIDENTS, REPLAY

    if (subject / "incident.json").is_file() or subject.is_file():
        return subject
    bundles = sorted(path.parent for path in (subject / INCIDENTS).glob(f"step-*/{REPLAY}"))
    if not bundles:
        raise UsageError(
            f"{subject} is neither an incident nor a run with one that can be replayed.\n"
            "To fix: give RUN/incidents/step-000042, or a run; safetrain diagnose RUN lists its incidents."
        )
    return bundles[-1]


def _other_batches(kept: Bundle, overrides: tuple[str, ...], device: str | None, trust: Trust) -> list[Any]:
    """The first of the run's data, to see that a change leaves them as they are; none where the data cannot be had."""
    from ..core.rundir import CONFIG
    from ..trainer.trainer import SafeTrainer
    from .diagnose import windows
    from .fit import _trainer_class
    from .flags import load

    unneeded = ("data.eval=null", "scheduler=null", "guards=null", "recovery={}", "logging={}")
    with suppress(
        Exception
    ):  # data of another machine, or code that is not trusted: one healthy step is made in any case
        config = load(str(kept.run_dir / CONFIG), (*overrides, *unneeded), device=device).config
        config.guards = {}
        config.loop.compile, config.loop.ema, config.loop.max_epochs = False, None, 1
        trust.check(dataclasses.asdict(config))
        trainer = _trainer_class(config, SafeTrainer)(config=config)
        try:
            return [window[0] for window in windows(trainer, 1, NUM_OTHERS)]
        finally:
            trainer.stream.close()
    return []


def _proposals(kept: Bundle, config: Any, trust: Trust, seconds: float, others: list[Any]) -> list[Proposal]:
    from ..fixes import propose
    from ..forensics import diagnose
    from ..incidents.replay import prepared
    from .replay import built

    trainer, import_class = built(kept, config, trust)
    parts = trainer.model, trainer.training_step, trainer.optimizer
    with prepared(kept, *parts, import_class, trainer.auxiliary_modules()) as (step, _):
        incident = kept.incident
        diagnosis = diagnose(step)
        if diagnosis.healthy:
            raise UsageError(
                f"step {incident.step} is finite now: the source, the data or the machine is not that of the run.\n"
                "To fix: nothing, if you have changed it already; safetrain replay says more."
            )
        diagnosis.fill(incident)
        return propose(step, incident, seconds, others)


def _report(kept: Bundle, found: list[Proposal], is_applied: bool, as_json: bool) -> None:
    from ..core.files import to_json
    from ..core.numbers import exact
    from ..incidents.render import paragraph
    from .blocks import echo, say

    if as_json:
        proposals = [{k: v for k, v in dataclasses.asdict(each).items() if k != "changed"} for each in found]
        click.echo(to_json({"step": kept.incident.step, "applied": is_applied, "proposals": proposals}))
        return
    cause = kept.incident.cause
    say(f"FIX for step {kept.incident.step}: {cause.label}", "green" if found[0].kind == "source" else "yellow")
    for number, proposal in enumerate(found):
        loss = "" if proposal.loss is None else f", loss {exact(proposal.loss)}"
        if proposal.kind == "source":
            how = {"identical": "bit for bit the same", "close": "nearly the same"}.get(proposal.on_healthy)
            count = proposal.num_healthy
            steps = "1 healthy step is" if count == 1 else f"{count} healthy steps are"
            same = f"{steps} {how}" if how else "no healthy step could be made to compare"
            label = "PROVEN" if number == 0 else "OR"
            for line in paragraph(label, f"the step is finite{loss}; {same}: {proposal.file}"):
                say(line)
            for line in proposal.diff.splitlines():
                echo(click.style(line, fg={"+": "green", "-": "red"}.get(line[:1])))
        else:
            for line in paragraph(proposal.kind.upper(), proposal.what):
                say(line)
    if is_applied:
        say(f"written to {found[0].file}; safetrain replay {kept.directory} runs the step with it", "green")
    elif found[0].kind == "source":
        say("add --apply to write the first of them")
