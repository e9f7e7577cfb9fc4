"""`safetrain check`: pre-flight in seconds, before anything is trained."""

from __future__ import annotations

import contextlib
import shutil
import sys
import traceback
from typing import TYPE_CHECKING

import click

from ..errors import NonFiniteError, SafetrainError
from .blocks import echo
from .flags import load
from .main import EXIT_CHECK_FAILED, EXIT_USER_EXCEPTION

if TYPE_CHECKING:
    from ..config import Config
    from ..preflight import Checked, CheckReport


@click.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]...")
@click.option("--only", metavar="NAMES", help="Only these checks, with commas (labels,learning_rate).")
@click.option(
    "--budget",
    type=click.FloatRange(min=0.0, min_open=True),
    default=10.0,
    show_default=True,
    help="Roughly how many seconds the checks may take; of large data only a sample is read.",
)
@click.option("--fix", is_flag=True, help="Write the changes of the config that are proposed to CONFIG.fixed.yaml.")
@click.option("--list", "list_checks", is_flag=True, help="List the checks and exit.")
@click.option("--seed", metavar="N", help="Seed of every random source.")
@click.option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps, …")
@click.option("--precision", metavar="fp32|bf16|fp16", help="Arithmetic of the forward pass.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("-q", "--quiet", is_flag=True, help="Only what failed or is worth a look.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(
    config: str | None,
    overrides: tuple[str, ...],
    only: str | None,
    budget: float,
    fix: bool,
    list_checks: bool,
    as_json: bool,
    quiet: bool,
    **flags: str | None,
) -> int:
    """Check data, model and first steps of CONFIG, a file or a recipe's name, before training.

    Builds everything as `fit` does and looks at it. Nothing is trained for good, and nothing is written, but with --fix.

    \b
    Examples:
      safetrain check my.yaml
      safetrain check my.yaml optimizer.lr=0.1 --only learning_rate
      safetrain check my.yaml --only data_finite,labels --budget 60
      safetrain check my.yaml --json
      safetrain check my.yaml --fix
      safetrain check --list

    \b
    Exit codes:
      0 nothing failed   1 exception in your code   2 usage or config   3 a check failed
    """
    if list_checks:
        from ..preflight import CHECKS

        width = max(len(each.name) for each in CHECKS)
        for each in CHECKS:
            click.echo(f"{each.name:<{width}}  {each.looks_at}")
        return 0
    if config is None:
        raise click.UsageError("Missing argument 'CONFIG'")
    loaded = load(config, overrides, **flags).config
    # Exceptions are handled here and not by click, which would take an EOFError of a data set for Ctrl-D.
    try:
        # What user code prints is not part of the JSON.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            report = _checked(loaded, only, budget, as_json, quiet)
    except Exception as error:
        if isinstance(error, SafetrainError) and not isinstance(error, NonFiniteError):
            raise
        traceback.print_exc()
        click.echo("\nsafetrain: the exception above was raised while model, data and optimizer were built", err=True)
        return EXIT_USER_EXCEPTION
    if as_json:
        from ..core.files import to_json

        click.echo(to_json(report.to_dict(), indent=2))
    else:
        echo(click.style(report.summary(), fg="green" if report.passed else "red", bold=True))
    if fix:
        _write_fixes(report, config, overrides)
    return 0 if report.passed else EXIT_CHECK_FAILED


def _write_fixes(report: CheckReport, config: str, overrides: tuple[str, ...]) -> None:
    from .check_fix import proposed, write_fixed

    changes = proposed(report, config, overrides)
    if not changes:
        click.echo("--fix: nothing that was found can be changed in the config", err=True)
        return
    target = write_fixed(config, [*(o for o in overrides if "=" in o), *changes])
    for change in changes:
        click.echo(f"  {change}", err=True)
    click.echo(f"--fix: written to {target}; look at it with: safetrain check {target}", err=True)


def _checked(config: Config, only: str | None, budget: float, as_json: bool, quiet: bool) -> CheckReport:
    from ..preflight import CHECKS, FAIL, WARN, check
    from ..preflight.report import render_one
    from ..trainer.trainer import SafeTrainer
    from .fit import _trainer_class

    name_width = max(len(each.name) for each in CHECKS)
    # A line per check and per fix where a program may read them.
    columns = min(shutil.get_terminal_size().columns, 140) if sys.stdout.isatty() else None

    def show(checked: Checked) -> None:
        if as_json or (quiet and checked.status not in (WARN, FAIL)):
            return
        for line in render_one(checked, name_width, columns):
            echo(_coloured(line, checked))

    return check(_trainer_class(config, SafeTrainer)(config=config), only, budget, show)


def _coloured(line: str, checked: Checked) -> str:
    from ..preflight.report import COLOURS

    status = checked.status
    if line.startswith(f"{status:<4}  "):
        label = click.style(f"{status:<4}", fg=COLOURS[status], bold=status in ("FAIL", "WARN"))
        return label + (click.style(line[4:], fg=COLOURS[status]) if status == "SKIP" else line[4:])
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    if text.startswith("fix: "):
        return indent + click.style("fix:", fg="cyan") + text[4:]
    return indent + (click.style(text, fg=COLOURS[status]) if status == "SKIP" else text)
