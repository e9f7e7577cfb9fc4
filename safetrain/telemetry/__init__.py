"""Who hears about a run: journal, console, TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

from ..config.schema import Config
from ..rundir import JOURNAL
from .journal import Journal, JournalFile
from .sink import ResumePoint, Sink, StepRecord, Telemetry

__all__ = ["JournalFile", "ResumePoint", "StepRecord", "Telemetry", "open_telemetry"]


def open_telemetry(config: Config, run_dir: Path, resume: ResumePoint | None) -> tuple[Telemetry, JournalFile]:
    """The sinks the config asks for, and the file of the journal."""
    journal = JournalFile(run_dir / JOURNAL, None if resume is None else resume.journal_position)
    sinks: list[Sink] = [Journal(journal)]
    mode = config.logging.console
    if mode == "json":
        sinks.append(Journal(sys.stdout, close=False))
    elif mode != "off":
        from .console import Console

        sinks.append(Console(config.loop.log_every, plain_text=mode == "plain"))
    if config.logging.tensorboard:
        from .tensorboard import TensorBoard

        sinks.append(TensorBoard(run_dir, config.loop.log_every, resume))
    return Telemetry(sinks), journal
