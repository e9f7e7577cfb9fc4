"""Recreates files of a run that were removed while it was training, so that the next checkpoint can be resumed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..core import ownership
from ..core.files import write_text
from ..core.rundir import CONFIG, JOURNAL, RunLock
from ..telemetry import JournalFile


def restore_removed(
    lock: RunLock, directory: Path, config: str, journal: JournalFile | None, warn: Callable[[str], None]
) -> None:
    """Raises RunDirectoryError if another process has taken the directory since."""
    was_removed = not lock.is_intact and lock.renew()
    missing = []
    if not (directory / CONFIG).exists():
        write_text(directory / CONFIG, config)
        ownership.mark(directory)
        missing.append(CONFIG)
    if journal is not None and not journal.is_intact:
        journal.begin_again()
        missing.append(f"{JOURNAL} (its earlier lines are lost)")
    if was_removed:
        warn(
            f"the run directory {directory} was removed while training, and was made again: its earlier journal, incidents and checkpoints "
            "are lost, and a resume goes on from the next checkpoint"
        )
    elif missing:
        warn(f"removed from {directory} while training, and made again: {', '.join(missing)}")
