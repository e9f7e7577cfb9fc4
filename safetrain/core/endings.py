"""How the last process of a run ended, read from the files that it left: for a resume, and for the launcher that
restarts it."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .result import FitResult
from .rundir import JOURNAL

FAULTS = "faults.jsonl"
"""One line for each time a run ended by a fault, and was resumed."""
TAIL = 2**20
"""Bytes at the end of a journal that are read."""
KILLED = "it ended without a word, as a process does that is killed (no memory left, a lost machine, SIGKILL)"
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SAFETRAIN_RESTART", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Ending:
    step: int
    """Steps that were attempted."""
    cause: str | None
    """None if it was no fault: the run was done, paused, interrupted or stopped by a guard."""
    time: float
    """Of the last sign of life, as the file system says."""

    def is_like(self, other: Ending | None) -> bool:
        """The same cause, whatever the numbers in its text (ports, seconds), at the same step."""
        if other is None or self.cause is None or other.cause is None or self.step != other.step:
            return False
        return _without_numbers(self.cause) == _without_numbers(other.cause)


def read_ending(run_dir: Path) -> Ending | None:
    """None if the run has no record yet."""
    try:
        with open(run_dir / JOURNAL, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - TAIL, 0))
            lines = [_parsed(line) for line in file.read().splitlines()]
            last_sign = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    events = [line for line in lines if line]
    steps = next((line["step"] + 1 for line in reversed(events) if line.get("event") == "step"), 0)
    last = events[-1] if events else {}
    if last.get("event") != "end":
        return Ending(steps, KILLED, last_sign)
    steps = last.get("attempted", steps)
    if last.get("status") != "error":
        return Ending(steps, None, last_sign)
    return Ending(steps, last.get("error") or "an error", last_sign)


def note_fault(run_dir: Path, ending: Ending) -> Ending | None:
    """Keep it; returns the one before."""
    before = last_fault(run_dir)
    with open(run_dir / FAULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(ending)) + "\n")
    return before


def last_fault(run_dir: Path) -> Ending | None:
    try:
        lines = (run_dir / FAULTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = _parsed(lines[-1].encode()) if lines else None
    return Ending(found["step"], found["cause"], found["time"]) if found else None


def is_restart() -> bool:
    """This process was started again by a program, not by a person."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in _RESTARTS)


def repeated(ending: Ending, run_dir: Path) -> str:
    """Why it is of no use to restart the run once more."""
    first = (ending.cause or "").splitlines()[0]
    return (
        f"the run in {run_dir} has failed twice in the same way at step {ending.step}: {first}\n"
        "It is not restarted again, because it would fail a third time.\n"
        f"To fix: remove the cause, then go on with safetrain resume {run_dir}."
    )


@dataclass(frozen=True)
class Resumption:
    """A process that goes on with a run."""

    ending: Ending
    steps_repeated: int

    def note(self, result: FitResult, from_step: int) -> None:
        """In the record of the run, which has been restored."""
        repeated, cause = self.steps_repeated, self.ending.cause
        result.resumes.append({"from_step": from_step, "steps_repeated": repeated, "cause": cause, "seconds": None})

    def over(self, result: FitResult) -> Resumption | None:
        """The first step is committed."""
        result.resumes[-1]["seconds"] = round(max(time.time() - self.ending.time, 0.0), 2)
        return None

    def describe(self) -> str:
        why = "" if self.ending.cause is None else f" by a fault at step {self.ending.step}: {self.ending.cause}"
        return (
            f"the process before this one ended{why or ' by itself'}; steps that are made again: {self.steps_repeated}"
        )


def of_resumed(run_dir: Path, position: int) -> Resumption | None:
    """How the run ended that is about to be resumed from this position of its journal; a fault is kept in a file.

    Raises UsageError in a process that was restarted by a program after the same fault twice.
    """
    ending = read_ending(run_dir)
    if ending is None:
        return None
    if ending.cause is not None:
        before = note_fault(run_dir, ending)
        if is_restart() and ending.is_like(before):
            raise UsageError(repeated(ending, run_dir))
    return Resumption(ending, count_steps(run_dir, position))


def count_steps(run_dir: Path, position: int) -> int:
    """Steps in the journal after that position: a resume from there makes them again."""
    try:
        with open(run_dir / JOURNAL, "rb") as file:
            file.seek(position)
            return sum(b'"event": "step"' in line for line in file)
    except OSError:
        return 0


def error_text(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", text.splitlines()[0])
