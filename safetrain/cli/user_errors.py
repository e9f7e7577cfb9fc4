"""An exception of the user's own code: its traceback, without the frames of the program around it, and what to do."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import click

from ..core.text import printable

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUNDLED = os.path.join(PACKAGE, "bundled")
"""Recipes and configs are the user's, wherever they lie."""
MODULE_CALLS = ("_wrapped_call_impl", "_call_impl", "inner")
"""Three frames of torch between each module and the one that calls it."""


def show_user_error(error: BaseException, stage: str, run_dir: Path | None = None) -> None:
    """On standard error: the traceback, what to do, and where the run was when it came to it. With -v no frame is left out."""
    context = click.get_current_context(silent=True)
    trace = traceback.TracebackException.from_exception(error)
    num_hidden = 0 if context is not None and context.obj == "verbose" else _prune(trace)
    click.echo(printable("".join(trace.format())), err=True)
    hidden = f" ({num_hidden} frames of safetrain and torch are left out above; -v shows them)" if num_hidden else ""
    click.echo(printable(f"To fix: {advice(error)}{hidden}"), err=True)
    if run_dir is not None:
        several = f" --nproc {size}" if (size := os.environ.get("WORLD_SIZE", "1")) != "1" else ""
        click.echo(f"Then go on from the last checkpoint: safetrain resume {run_dir}{several}", err=True)
    click.echo(f"safetrain: the exception above was raised {stage}", err=True)


def advice(error: BaseException) -> str:
    """What to do first."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package that provides {error.name} (pip install …), or correct the import."
    if isinstance(error, FileNotFoundError) and error.filename:
        relative = "" if os.path.isabs(str(error.filename)) else f", a relative path, looked up in {os.getcwd()}"
        return f"make sure that {error.filename} exists{relative}."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame)]
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
    if not own:
        report = "report it with the output of -v and of safetrain env."
        if frames:  # a library that the config has put to work
            return (
                "the config gives torch, or another library, what it cannot work with: check the arguments of model, data, loss, "
                f"optimizer and scheduler, and whether their shapes fit each other. If they are right, {report}"
            )
        return f"this looks like a mistake in safetrain; {report}"
    place = own[-1]
    return f"look at {place.filename}:{place.lineno}, in {place.name}."


def _prune(trace: traceback.TracebackException) -> int:
    """Leave out our frames, also in the exceptions that led to this one; returns how many."""
    linked = [trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())]
    num_hidden = sum(_prune(other) for other in linked if other is not None)
    kept = [frame for frame in trace.stack if not _is_noise(frame)]
    # Where all of them are ours, or the last one is, the mistake may be ours too.
    if not kept or _is_ours(trace.stack[-1]):
        return num_hidden
    num_hidden += len(trace.stack) - len(kept)
    trace.stack = traceback.StackSummary.from_list(kept)
    return num_hidden


def _is_noise(frame: traceback.FrameSummary) -> bool:
    return _is_ours(frame) or (
        frame.name in MODULE_CALLS and frame.filename.endswith(os.path.join("torch", "nn", "modules", "module.py"))
    )


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(PACKAGE + os.sep) and not frame.filename.startswith(BUNDLED + os.sep)
