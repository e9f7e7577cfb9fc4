"""Reads the directory of a run: finished, still running, killed in the middle of a line, or resumed."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.files import read_text
from ..core.rundir import CHECKPOINTS, CONFIG, JOURNAL, SUMMARY, holds_run, is_in_use
from ..errors import RunDirectoryError
from .incidents import IncidentList, step_number
from .series import Marks, Series

STATUSES = ("done", "stopped", "interrupted", "paused", "error")
MAX_CONFIG = 2**21
MAX_LISTED = 1000
"""Rollbacks, evaluations and notes that are kept; further ones are only counted."""
_CHECKPOINT = re.compile(r"step-(\d{6,})(?:-\d+)?$")


@dataclass(frozen=True)
class RollbackEvent:
    step: int
    """The attempted step after which it happened."""
    to_step: int
    source: str


@dataclass(frozen=True)
class Checkpoint:
    step: int
    name: str
    links: tuple[str, ...]
    """`last`, `best`."""


@dataclass
class RunHistory:
    """What the journal and the directory of a run contain. Steps are attempted steps, counted from 0; a rollback does not rewind them."""

    directory: Path
    about: dict[str, Any] = field(default_factory=dict)
    """The `start` line: name, parameters, device, precision, guards."""
    status: str = "unknown"
    """`done`, `stopped`, `interrupted`, `paused`, `error`; `running`; `lost`: the process died."""
    end: dict[str, Any] = field(default_factory=dict)
    """The summary, once the run has ended."""
    loss: Series = field(default_factory=Series)
    """Of committed steps."""
    refused_loss: Series = field(default_factory=Series)
    """Of steps that were not committed, or only after a repair."""
    grad_norm: Series = field(default_factory=Series)
    refused_grad_norm: Series = field(default_factory=Series)
    lr: Series = field(default_factory=Series)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of steps that were not committed."""
    skipped: Marks = field(default_factory=Marks)
    overflows: Marks = field(default_factory=Marks)
    rollbacks: list[RollbackEvent] = field(default_factory=list)
    resumes: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    saved: Marks = field(default_factory=Marks)
    """Steps before which a checkpoint was written."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """On disk now."""
    incidents: IncidentList = field(default_factory=IncidentList)
    num_rollbacks: int = 0
    num_committed: int = 0
    last_step: int = -1
    lowest_lr_scale: float = 1.0
    config: str = ""
    problems: list[str] = field(default_factory=list)
    """What could not be read, as sentences."""

    @property
    def name(self) -> str:
        return str(self.about.get("name") or self.directory.resolve().name)

    @property
    def num_attempted(self) -> int:
        return self.last_step + 1

    @property
    def num_skipped(self) -> int:
        return sum(self.outcomes.values())


def read_run(directory: str | Path) -> RunHistory:
    """Raises RunDirectoryError if there is no run. The journal is read line by line, so it may be of any length."""
    path = Path(directory)
    if not path.is_dir() or not (held := holds_run(path)):
        what = "is not a directory" if path.exists() and not path.is_dir() else "does not exist"
        if path.is_dir():
            what = f"holds no run (it has neither {CONFIG} nor {JOURNAL} nor {SUMMARY})"
        raise RunDirectoryError(
            f"{directory} {what}.\nTo fix: give the directory of a run, like runs/quickstart-20260101-120000; "
            "safetrain fit prints it as it starts."
        )
    run = RunHistory(path)
    if JOURNAL in held:
        _read_journal(path / JOURNAL, run)
    else:
        run.problems.append(f"{JOURNAL} is missing: there is no record of single steps")
    run.config = _text(path / CONFIG, run) if CONFIG in held else ""
    run.checkpoints = _checkpoints(path / CHECKPOINTS)
    _judge_status(run, SUMMARY in held)
    run.incidents.add_bundles(path, run.problems)
    run.incidents.finish()
    return run


def _text(path: Path, run: RunHistory) -> str:
    try:
        return read_text(path, MAX_CONFIG)
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        return ""


# ---- the journal -----------------------------------------------------------------------------------------------------


def _read_journal(path: Path, run: RunHistory) -> None:
    num_unreadable, line = 0, b"\n"
    try:
        if not path.is_file():  # a device, say, would never end
            raise OSError("it is no ordinary file")
        with open(path, "rb", buffering=2**20) as file:
            for line in file:
                try:
                    fields = json.loads(line)
                    (_step if fields["event"] == "step" else _event)(run, fields)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                    num_unreadable += bool(line.strip())
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error.strerror or error}")
    if num_unreadable and not line.endswith(b"\n"):
        num_unreadable -= 1
        run.problems.append(f"{path.name} ends in the middle of a line: the last record is lost")
    if num_unreadable:
        run.problems.append(f"{num_unreadable} line{'s' * (num_unreadable > 1)} of {path.name} could not be read")


def _step(run: RunHistory, fields: dict[str, Any]) -> None:
    """NaN and Inf are strings in the journal."""
    step, action, committed = step_number(fields["step"]), str(fields["action"]), int(fields["committed"])
    loss, norm, lr, lr_scale = (float(fields[name]) for name in ("loss", "grad_norm", "lr", "lr_scale"))
    run.lr.add(step, lr)
    if action == "commit":
        run.loss.add(step, loss)
        run.grad_norm.add(step, norm)
        if (
            refused := fields.get("refused_loss")
        ) is not None:  # repaired: the curve shows the loss that was trained on
            run.refused_loss.add(step, float(refused))
    else:
        run.refused_loss.add(step, loss)
        run.refused_grad_norm.add(step, norm)
        (run.overflows if action == "overflow" else run.skipped).add(step)
        run.outcomes[action] += 1
    run.last_step, run.num_committed = step, committed
    run.lowest_lr_scale = min(run.lowest_lr_scale, lr_scale)


def _event(run: RunHistory, fields: dict[str, Any]) -> None:
    event = fields.pop("event")
    if event == "incident":
        run.incidents.add(fields)
    elif event == "rollback":
        to_step, run.num_committed = step_number(fields["to_step"]), int(fields["committed"])
        run.num_rollbacks += 1
        if len(run.rollbacks) < MAX_LISTED:
            run.rollbacks.append(RollbackEvent(max(run.last_step, 0), to_step, str(fields["source"])))
    elif event == "checkpoint":
        run.saved.add(step_number(fields["step"]))
    elif event == "eval":
        fields["step"] = step_number(fields["step"])
        run.evaluations = [*run.evaluations[-MAX_LISTED:], fields]
    elif event in ("start", "resume"):
        run.about = fields
        run.end = {}
        if event == "resume":
            run.resumes.append((run.last_step + 1, str(fields.get("resumed"))))
    elif event == "note" and len(run.notes) < MAX_LISTED:
        run.notes.append(str(fields["text"]))
    elif event == "end":
        run.end = fields


# ---- other files ----------------------------------------------------------------------------------------------------


def _checkpoints(directory: Path) -> list[Checkpoint]:
    """The checkpoints that are on disk now; older ones were deleted by rotation."""
    if not directory.is_dir():
        return []
    links: dict[str, list[str]] = {}
    for link in ("last", "best"):
        if (directory / link).is_symlink():
            links.setdefault(os.readlink(directory / link), []).append(link)
    found = [
        (_CHECKPOINT.match(path.name), path) for path in directory.iterdir() if path.is_dir() and not path.is_symlink()
    ]
    kept = [Checkpoint(int(match[1]), path.name, tuple(links.get(path.name, ()))) for match, path in found if match]
    return sorted(kept, key=lambda checkpoint: checkpoint.step)


def _judge_status(run: RunHistory, has_summary: bool) -> None:
    if run.end:
        status = run.end.get("status")
        run.status = str(status) if status in STATUSES else "lost"
    elif is_in_use(run.directory):
        run.status = "running"
    else:
        run.status = "lost"
        if has_summary and run.last_step < 0 and not run.about:  # nothing else is left
            _take_summary(run)


def _take_summary(run: RunHistory) -> None:
    try:
        run.end = json.loads(read_text(run.directory / SUMMARY))
        run.status = str(run.end["status"])
        run.num_committed, run.num_rollbacks = int(run.end["steps"]), int(run.end["rollbacks"])
        run.last_step = int(run.end["attempted"]) - 1
        for fields in run.end["incidents"]:
            run.incidents.add(fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        run.problems.append(f"{SUMMARY} cannot be read: {error}")
