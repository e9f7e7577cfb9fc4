"""The program `safetrain`: finds the command, runs it, and turns what it raises into an exit code.

0 done    1 exception in user code    2 usage or config    3 a check failed    4 stopped by a guard    5 incidents under --strict
128 + n   ended by signal n (130 for Ctrl-C), with the state saved
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from .. import __version__
from ..core.text import printable
from ..errors import DeviceLost, HangError, Interrupted, RankError, SafetrainError, TrainingStopped

EXIT_USER_EXCEPTION = 1
EXIT_USAGE = 2
EXIT_CHECK_FAILED = 3
EXIT_STOPPED = 4
EXIT_INCIDENTS = 5

ARGUMENTS = "safetrain.arguments"
"""Where a command finds all that the program was called with, in `click.Context.meta`."""

# Help is written here as well, because asking the commands for it would import them all.
COMMANDS = {
    "fit": "Train.",
    "resume": "Go on with a run exactly where it was.",
    "check": "Check data, model and first steps before training.",
    "diagnose": "Find the first bad operation of a config or a run.",
    "replay": "Run the step of an incident again.",
    "fix": "Propose a change of your source for an incident.",
    "report": "Write the HTML report of a run.",
    "simulate": "What the guards would have suspected on a run that exists.",
    "export": "Write the weights of a run to one file.",
    "config": "Show, check or document a config.",
    "explain": "Print the loop with the guards plugged into it.",
    "lint": "Look for patterns in source code that go NaN later.",
    "init": "Create a new project that trains as generated.",
    "recipes": "List or copy the recipes that ship with safetrain.",
    "env": "Print versions and devices, for a bug report.",
}


class LazyCommands(click.Group):
    """Imports a command when it is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f".{cmd_name}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f", did you mean '{close[0]}'?" if close else f"; commands: {', '.join(COMMANDS)}"
            ctx.fail(f"no command '{args[0]}'{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", message="safetrain %(version)s")
def program() -> None:
    """A PyTorch training loop that cannot be silently ruined.

    \b
    Examples:
      safetrain fit quickstart                       train a recipe
      safetrain fit my.yaml optimizer.lr=1e-4        train your own, with a change
      safetrain explain my.yaml                      see the loop with its guards
      safetrain config validate my.yaml              find every mistake, in a moment
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    verbose = any(argument in ("-v", "--verbose") for argument in arguments)
    code = run(arguments, verbose)
    _flush_standard_streams()
    sys.exit(code)


def _flush_standard_streams() -> None:
    """What cannot be written (a full disk, a closed pipe) must not change the exit code: Python would end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except AttributeError:  # there is no such stream
            pass


def _open_standard_streams() -> None:
    """Where one was closed, the next file to be opened would get its number, and what libraries print would be written into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # A pipe on Windows (cp1252, say) does not know every character that is printed.
            stream.reconfigure(errors="backslashreplace")


def run(arguments: list[str], verbose: bool = False) -> int:
    """Run the program; returns its exit code."""
    try:
        code = program.main(arguments, prog_name="safetrain", standalone_mode=False, obj="verbose" if verbose else None)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        with io.StringIO() as text:
            error.show(text)
            click.echo(printable(text.getvalue()), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except SafetrainError as error:
        if verbose:
            traceback.print_exc()
        else:
            click.echo(printable(str(error)), err=True)
        from ..distributed.launch import record_failure

        record_failure(error, exit_code(error))
        return exit_code(error)


def exit_code(error: SafetrainError) -> int:
    if isinstance(error, TrainingStopped):
        return EXIT_STOPPED
    if isinstance(error, (RankError, HangError, DeviceLost)):
        return EXIT_USER_EXCEPTION
    return 128 + error.signum if isinstance(error, Interrupted) else EXIT_USAGE
