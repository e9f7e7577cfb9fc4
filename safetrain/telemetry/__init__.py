"""Who hears about a run: journal, console, TensorBoard, trackers."""

from __future__ import annotations

import sys
from pathlib import Path

from ..config.schema import Config
from ..core.rundir import JOURNAL
from .journal import Journal, JournalFile
from .sink import ResumePoint, Sink, StepRecord, Telemetry
from .vitals import Vitals

__all__ = ["JournalFile", "ResumePoint", "StepRecord", "Telemetry", "open_telemetry"]


def open_telemetry(config: Config, run_dir: Path, resume: ResumePoint | None) -> tuple[Telemetry, JournalFile]:
    """The sinks the config asks for, and the file of the journal."""
    if trackers := list(config.logging.trackers):
        from .trackers import check_available

        check_available(trackers)  # before anything is written
    journal = JournalFile(run_dir / JOURNAL, None if resume is None else resume.journal_position)
    sinks: list[Sink] = [Journal(journal), *_console(config)]
    if config.logging.tensorboard or trackers:
        sinks += _curves(config, run_dir, resume)
    before = resume or ResumePoint()
    return Telemetry(sinks, config.loop.log_every, Vitals(before.num_skipped, before.num_rollbacks)), journal


def _console(config: Config) -> list[Sink]:
    mode = config.logging.console
    if mode == "json":
        return [Journal(sys.stdout, close=False)]
    if mode == "off":
        return []
    from .console import Console, is_watched

    if mode == "auto" and is_watched():
        from .live import LiveConsole

        return [LiveConsole(config.loop.log_every)]
    return [Console(config.loop.log_every)]


def _curves(config: Config, run_dir: Path, resume: ResumePoint | None) -> list[Sink]:
    from dataclasses import asdict

    from ..config import to_yaml

    settings = asdict(config)
    sinks: list[Sink] = []
    if config.logging.tensorboard:
        from .environment import environment
        from .tensorboard import TensorBoard, fenced, table

        texts = {"run/config": fenced(to_yaml(config), "yaml"), "run/environment": table(environment())}
        sinks.append(TensorBoard(run_dir, settings, texts, resume))
    if config.logging.trackers:
        from .trackers import Tracker

        project = config.logging.project or config.name
        sinks += [Tracker(name, project, run_dir, settings) for name in config.logging.trackers]
    return sinks
