"""`--nproc N`: runs the same command in N processes on this machine.

torch's elastic launcher starts them, and terminates the others when one fails. This module decides where their output goes,
which rank failed first, and the exit code.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._private import elastic
from .._private.parent import signal_when_parent_ends
from ..core import endings
from ..errors import RankError, UsageError

EXIT_CODE = "exit_code"
TAIL = 60
"""Lines of a failing rank's error output that are shown."""


_ASKED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
NOT_RESTARTED = {2, 3, 4, 5, *(128 + getattr(signal, name) for name in _ASKED if hasattr(signal, name))}
"""Exit codes after which the same command would end in the same way, or that were asked for: usage, a failed check, a stop by a
guard, incidents under --strict, a signal."""


def launch(
    arguments: Sequence[str], num_processes: int, run_dir: Path, say: Callable[[str], None], restarts: int = 0
) -> int:
    """Run `safetrain ARGUMENTS` in `num_processes` processes; returns 0, or the exit code of the rank that failed first.

    The output of every rank is kept in `logs/` of the run directory; that of rank 0 is also shown. After a fault all are started
    again, up to `restarts` times, unless the same fault came twice at the same step.
    """
    if "RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError(
            "--nproc starts processes itself, but a launcher has already started this one (RANK is set).\n"
            "To fix: leave --nproc out, or start the command without torchrun and accelerate launch."
        )
    elastic.require(num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_processes, 1)))
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # `_report` reports it
    for attempt in range(restarts + 1):
        os.environ["SAFETRAIN_RESTART"] = str(attempt)
        code = _run_once(arguments, num_processes, _new_directory(run_dir / "logs"), say)
        if code == 0 or code in NOT_RESTARTED or attempt == restarts:
            break
        ending = endings.read_ending(run_dir)
        if ending is not None and ending.is_like(endings.last_fault(run_dir)):
            say(endings.repeated(ending, run_dir))
            break
        say(f"restart {attempt + 1} of {restarts}, from the newest checkpoint that verifies")
    return code


def _run_once(arguments: Sequence[str], num_processes: int, logs: Path, say: Callable[[str], None]) -> int:
    try:
        elastic.run(["-m", "safetrain", *arguments], num_processes, logs)
    except elastic.RanksFailed as error:
        return _report(error.failures, logs, say)
    except elastic.Interrupted as error:
        say(f"interrupted by signal {error.signal}; the output of each rank is in {logs}")
        return 128 + error.signal
    return 0


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """The arguments without `--option value` or `--option=value`."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def end_with_launcher() -> None:
    """Let this process end, with its state saved, when the launcher that started it is gone: nothing else would end it, and it
    might wait for the other ranks for half an hour. Linux only; without a launcher nothing happens."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if signal_when_parent_ends(signal.SIGTERM) and os.getppid() != parent:  # it had ended just before
        signal.raise_signal(signal.SIGTERM)


def record_failure(error: BaseException, code: int) -> None:
    """Record for the launcher that this rank failed by itself (not because another rank did), and its exit code.

    The launcher may terminate the process before it exits with that code.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or isinstance(error, RankError):
        return
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": trace, "timestamp": str(int(time.time())), EXIT_CODE: code}
    try:
        Path(file).write_text(
            json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
        )
    except OSError:
        logging.getLogger("safetrain").warning("the failure of this rank could not be recorded in %s", file)


def _new_directory(parent: Path) -> Path:
    """A numbered one for each launch, so that a resume keeps the earlier output."""
    number = 1
    while True:
        path = parent / str(number)
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1


def _recorded_code(error_file: str) -> int | None:
    try:
        code = json.loads(Path(error_file).read_text())["message"]["extraInfo"].get(EXIT_CODE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no record, or one that torch wrote itself
    return code if isinstance(code, int) else None


def _report(failures: dict[int, Any], logs: Path, say: Callable[[str], None]) -> int:
    """Report which rank failed first, with the end of its error output; returns its exit code."""
    # A rank that failed only because another did writes no error file.
    ranks = sorted(failures, key=lambda rank: (not Path(failures[rank].error_file).is_file(), failures[rank].timestamp))
    rank, failure = ranks[0], failures[ranks[0]]
    code = _recorded_code(failure.error_file)
    if code is None:
        code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    errors = logs / f"rank-{rank}.stderr.log"
    lines = errors.read_text(errors="replace").splitlines() if errors.is_file() else []
    shown = logs / "rank-0.stderr.log"  # was shown as it was written
    known = set(shown.read_text(errors="replace").splitlines()) if shown.is_file() else set()
    if not known.issuperset(lines):
        say("\n".join(["", f"error output of rank {rank}:", *lines[-TAIL:]]))
    say(f"\nrank {rank} failed first, with exit code {code}; the output of each rank is in {logs}")
    return code
