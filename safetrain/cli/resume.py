"""`safetrain resume`: continue a run exactly where it was."""

from __future__ import annotations

from pathlib import Path

import click

from .fit import RESTARTS, in_processes, train_and_report
from .flags import load


@click.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]...")
@click.option("--force", is_flag=True, help="Also with a changed model, data, optimizer or arithmetic.")
@click.option("--nproc", metavar="N", type=click.IntRange(1), default=1, help="Processes on this machine.")
@click.option("--restarts", metavar="N", type=click.IntRange(0), default=0, help=RESTARTS)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "json_lines", is_flag=True, help="Print the journal's lines instead of progress.")
@click.option("--strict", is_flag=True, help="Exit with code 5 if there was any incident, even if it was survived.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(
    run: Path,
    overrides: tuple[str, ...],
    force: bool,
    nproc: int,
    restarts: int,
    quiet: bool,
    json_lines: bool,
    strict: bool,
) -> int:
    """Go on with the run in directory RUN, exactly where its newest sound checkpoint is.

    The result is bit for bit that of a run which was never interrupted. Overrides may change how long it trains, and what is
    watched, saved and shown; a change of the training itself is refused unless forced.

    \b
    Examples:
      safetrain resume runs/first
      safetrain resume runs/first loop.max_steps=2000
      safetrain resume runs/first checkpoint.every_steps=100 -q

    \b
    Exit codes: those of safetrain fit.
    """
    from ..core.rundir import CONFIG, existing_run_dir

    if quiet and json_lines:
        raise click.UsageError("--quiet and --json exclude each other")
    console = "json" if json_lines else "off" if quiet else None
    loaded = load(str(existing_run_dir(run) / CONFIG), overrides, console=console)
    if nproc > 1 or restarts:
        return in_processes(nproc, run, restarts)
    return train_and_report(loaded.config, str(run), strict, "force" if force else True)
