"""`safetrain diagnose`: find the first bad operation of a config's steps without training, or show the incidents of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.numbers import listed
from ..core.progress import note
from ..core.text import printable
from ..errors import NonFiniteError, SafetrainError, UsageError
from ..incidents.render import NUM_SAMPLES
from .bars import progress_bar
from .blocks import say, show
from .flags import load
from .main import EXIT_CHECK_FAILED, EXIT_USER_EXCEPTION
from .user_errors import show_user_error

if TYPE_CHECKING:
    from ..config import Config
    from ..core.incident import Incident, Origin
    from ..trainer.trainer import SafeTrainer


@click.command()
@click.argument("subject", metavar="CONFIG|RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]...")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps of CONFIG to examine.")
@click.option("--scan", is_flag=True, help="Look through all of the training data of CONFIG instead.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="End a scan after N bad batches."
)
@click.option("--step", type=click.IntRange(min=0), help="Only the incident of this step of RUN.")
@click.option("--no-remedies", is_flag=True, help="Only find the operations, try nothing.")
@click.option("--seed", metavar="N", help="Seed of every random source.")
@click.option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps, …")
@click.option("--precision", metavar="fp32|bf16|fp16", help="Arithmetic of the forward pass.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(
    subject: str,
    overrides: tuple[str, ...],
    steps: int,
    scan: bool,
    limit: int,
    step: int | None,
    no_remedies: bool,
    as_json: bool,
    **flags: str | None,
) -> int:
    """Find the first bad operation of a config or a run.

    Of CONFIG, a file or a recipe's name: builds model and data and examines the first steps, each with the weights as they
    are at the start. Nothing is trained, written or changed. With --scan every batch of the training data is run once, in the
    order of the data set, and those that are not finite are examined.

    Of RUN, the directory of a run: shows its incidents, newest first; the same operation is explained once.

    \b
    Examples:
      safetrain diagnose my.yaml                       the first three steps
      safetrain diagnose my.yaml --scan                all of the training data
      safetrain diagnose my.yaml data.batch_size=8 --precision fp16
      safetrain diagnose runs/first                    the incidents of a run
      safetrain diagnose runs/first --step 42 --json   one of them, for a program

    \b
    Exit codes:
      0 healthy, or the incidents of a run were shown   1 exception in your code   2 usage or config
      3 a step of CONFIG is bad
    """
    if _is_run(subject):
        if overrides or scan or any(flags.values()):
            raise click.UsageError(f"{subject} is a run; overrides, --scan and flags of a config do not apply to it")
        return _show_run(Path(subject), step, as_json)
    if step is not None:
        raise click.UsageError("--step chooses an incident of a run; give the run's directory")
    config = load(subject, overrides, **flags).config
    # Exceptions are handled here and not by click, which would take an EOFError of a data set for Ctrl-D.
    try:
        examined = Examination(config, not no_remedies)
        with progress_bar("scanning" if scan else "examining"):
            found = examined.scan(limit) if scan else examined.steps(steps)
    except Exception as error:
        if isinstance(error, SafetrainError) and not isinstance(error, NonFiniteError):
            raise
        show_user_error(error, "while the steps were built and examined")
        return EXIT_USER_EXCEPTION
    examined.report(found, as_json)
    return EXIT_CHECK_FAILED if found else 0


def _is_run(subject: str) -> bool:
    from ..config.sources import recipe_names
    from ..core.rundir import holds_run

    path = Path(subject)
    if not path.is_dir():
        return False
    if holds_run(path) or (path / "incidents").is_dir():
        return True
    if subject in recipe_names():
        return False
    raise UsageError(
        f"{subject} is a directory that holds no run.\nTo fix: give a run's directory, a config file, or a recipe's name."
    )


# ---- the steps of a config -----------------------------------------------------------------------------------------


class Examination:
    """Runs steps of a config without training. What was found is `(position, incident)`, in order."""

    def __init__(self, config: Config, remedies: bool) -> None:
        self._config, self._remedies = config, remedies
        self._known: set[Any] = set()
        self._num_examined = 0
        self._unit = "step"
        self._stopped = False

    def steps(self, count: int) -> list[tuple[int, Incident]]:
        """The first steps, whole windows of micro-batches, each with the initial weights."""
        from ..forensics import Step, diagnose

        trainer = self._build()
        found = []
        with self._prepared(trainer):
            for position, window in enumerate(windows(trainer, self._config.loop.grad_accum, count)):
                note("step", position, count)
                precision = trainer.precision.name, trainer.precision.host_loss_scale()
                step = Step(trainer.stepper.called, trainer.training_step, window, trainer.optimizer, *precision)
                diagnosis = diagnose(step, self._effort())
                if diagnosis.error is not None and diagnosis.is_error_of_the_program:
                    raise diagnosis.error
                self._num_examined += 1
                if not diagnosis.healthy:
                    self._note(diagnosis.origin)
                    found.append((position, _incident(position, diagnosis)))
        return found

    def scan(self, limit: int) -> list[tuple[int, Incident]]:
        """Every batch of one epoch. A data set with indices is gone through in their order."""
        from ..forensics import find_bad_batches

        self._unit = "batch"
        self._config.data.shuffle = False
        trainer = self._build()
        with self._prepared(trainer):
            precision, effort = trainer.precision.name, self._effort(note=True)
            with closing(self._counted(window[0] for window in windows(trainer, 1, None))) as batches:
                total = trainer.stream.num_batches()
                found = find_bad_batches(trainer.model, trainer.training_step, batches, precision, limit, effort, total)
        self._stopped = len(found) >= limit
        return found

    def _counted(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        for batch in batches:
            self._num_examined += 1
            yield batch

    def _build(self) -> SafeTrainer:
        from ..trainer.trainer import SafeTrainer
        from .fit import _trainer_class

        self._trainer = _trainer_class(self._config, SafeTrainer)(config=self._config)
        return self._trainer

    def _prepared(self, trainer: SafeTrainer) -> ExitStack:
        """The numbers come out as they do in a run."""
        from ..distributed.machine import deterministic_algorithms

        with ExitStack() as stack:
            stack.callback(trainer.stream.close)
            if self._config.loop.deterministic:
                stack.enter_context(deterministic_algorithms())
            for guard in trainer.guards:
                if guard.name == "islands" and (remove := guard.attach(trainer.model)) is not None:
                    stack.callback(remove)
            return stack.pop_all()

    def _effort(self, note: bool = False) -> Any:
        from ..forensics import Effort

        def is_known(origin: Origin) -> bool:
            known = _place(origin) in self._known
            if note:
                self._note(origin)
            return known

        return Effort(self._remedies, is_known)

    def _note(self, origin: Origin) -> None:
        self._known.add(_place(origin))

    # ---- telling -----------------------------------------------------------------------------------------------

    def report(self, found: list[tuple[int, Incident]], as_json: bool) -> None:
        if as_json:
            incidents = [{**i.to_dict(), "indices": self._indices(p, i)} for p, i in found]
            _print_json({"examined": self._num_examined, "unit": self._unit, "incidents": incidents})
            return
        plural = "batches" if self._unit == "batch" else "steps"
        head = f"{self._config.name}: {self._num_examined} {plural} examined"
        if not found:
            say(f"{head}, all healthy", "green")
            return
        say(f"{head}, {len(found)} bad", "red")
        shown: set[Any] = set()
        for position, incident in found:
            title = f"{self._unit.upper()} {position}: {incident.trigger.signal} is bad, {incident.cause.label}"
            if indices := self._indices(position, incident):
                title += f"; in the data set at {listed(indices, NUM_SAMPLES)}"
            _show_once(incident, title, shown)
        if self._stopped:
            say(f"the scan ended at {len(found)} bad batches; --limit N looks for more")

    def _indices(self, position: int, incident: Incident) -> list[int]:
        """Indices of the guilty samples in the data set, where a batch is consecutive samples."""
        from ..data.sources import MapSource

        if self._unit != "batch" or not isinstance(self._trainer.stream.source, MapSource):
            return []
        return [position * self._config.data.batch_size + sample for sample in incident.samples]


def windows(trainer: SafeTrainer, size: int, count: int | None) -> Iterator[list[Any]]:
    """The windows of the first epoch, at most `count`."""
    return itertools.islice(iter(lambda: trainer.stream.take(size), []), count)


def _incident(position: int, diagnosis: Any) -> Incident:
    from datetime import datetime, timezone

    from ..core.incident import Incident, Outcome, Trigger

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    trigger = Trigger("diagnose", diagnosis.signal, diagnosis.value)
    incident = Incident(position, now, trigger, Outcome("none", [f"non-finite {diagnosis.signal}"]))
    diagnosis.fill(incident)
    return incident


# ---- the incidents of a run ----------------------------------------------------------------------------------------


def _show_run(run: Path, step: int | None, as_json: bool) -> int:
    every = incidents = _incidents_of(run)
    if step is not None:
        chosen = [incident for incident in incidents if incident.step == step]
        if not chosen:
            steps = ", ".join(str(incident.step) for incident in incidents) or "none"
            raise UsageError(f"{run} has no incident at step {step}.\nTo fix: choose one of these: {steps}.")
        incidents = chosen
    if as_json:
        _print_json({"run": str(run), "incidents": [{**i.to_dict(), "path": i.path} for i in incidents]})
        return 0
    if not incidents:
        say(f"{run}: no incident", "green")
        return 0
    if step is None:
        say(f"{run}: {len(incidents)} incident{'s' if len(incidents) > 1 else ''}, newest first")
    from ..core.incident import CONSEQUENCE
    from ..incidents.render import paragraph, row

    shown: set[Any] = set()
    _share_remedies(every)
    for incident in incidents:
        title = f"INCIDENT at step {incident.step}, {incident.time}: {CONSEQUENCE[incident.decision.action]}"
        caught = paragraph("CAUGHT BY", "; ".join(incident.decision.reasons))
        _show_once(incident, title, shown, caught)
        if incident.path is not None:
            say(row("AGAIN", f"safetrain replay {run / incident.path}"))
    return 0


def _incidents_of(run: Path) -> list[Incident]:
    """Newest first: those kept whole, and those that are only in the journal."""
    from ..core.rundir import JOURNAL
    from ..incidents.bundle import INCIDENTS, incident_from, read_incident

    by_step: dict[int, Incident] = {}
    journal = run / JOURNAL
    for line in _lines_of(journal):
        try:
            record = json.loads(line)
            if record.get("event") == "incident":
                incident = incident_from({key: value for key, value in record.items() if key != "event"})
                by_step[incident.step] = incident
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue  # the end of a line that was being written, a newer format, or damage
    for directory in sorted((run / INCIDENTS).glob("step-*")):
        if (directory / "incident.json").is_file():
            try:
                incident = read_incident(directory)
            except UsageError as problem:
                click.echo(printable(f"left out: {problem}"), err=True)
                continue
            by_step[incident.step] = incident
    return sorted(by_step.values(), key=lambda incident: incident.step, reverse=True)


def _lines_of(journal: Path) -> list[str]:
    from ..core.files import read_text

    try:
        return read_text(journal).splitlines()
    except FileNotFoundError:
        return []
    except OSError as problem:
        click.echo(printable(f"left out: {problem}"), err=True)
        return []


def _share_remedies(incidents: list[Incident]) -> None:
    """Remedies are tried once per place in the source; but for samples, what helped there helps the other incidents there."""
    tried = {_place(incident.origin): incident for incident in incidents if incident.remedies}
    for incident in incidents:
        first = tried.get(_place(incident.origin))
        if first is not None and not incident.remedies and incident.origin.op is not None:
            incident.remedies = [remedy for remedy in first.remedies if remedy.name != "drop_samples"]
            incident.fix = first.fix


# ---- both ----------------------------------------------------------------------------------------------------------


def _show_once(incident: Incident, title: str, shown: set[Any], before: Sequence[str] = ()) -> None:
    """The whole block for the first incident at a place in the source, a line or two for the next."""
    place = _place(incident.origin)
    click.echo()
    if incident.was_investigated and place not in shown:
        show(incident, title, "yellow", before)
        shown.add(place)
        return
    say(title, "yellow")
    for line in before:
        say(line)
    is_same = incident.origin.phase != "unknown"
    samples = f", samples {listed(incident.samples, NUM_SAMPLES)}" if incident.samples else ""
    say(f"  the same operation as above{samples}" if is_same else f"  {incident.cause.explanation}")


def _place(origin: Origin) -> tuple[Any, ...]:
    return origin.file, origin.line, origin.op, origin.module


def _print_json(value: Any) -> None:
    from ..core.files import to_json

    click.echo(to_json(value, indent=2))
