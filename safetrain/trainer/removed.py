"""A run directory that was removed while its run was training: made again, so that the next checkpoint can be resumed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..core import ownership
from ..core.files import write_text
from ..core.rundir import CONFIG
from ..telemetry import JournalFile


def restore_removed(directory: Path, config: str, journal: JournalFile | None, warn: Callable[[str], None]) -> None:
    write_text(directory / CONFIG, config)
    ownership.mark(directory)
    if journal is not None:
        journal.begin_again()
    warn(
        f"the run directory {directory} was removed while training, and was made again: its earlier journal, incidents and checkpoints are lost, "
        "and a resume goes on from the next checkpoint"
    )
