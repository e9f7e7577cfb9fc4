"""Logging of a run: journal, console, TensorBoard, trackers, and your own sinks (listeners)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.render import to_public_dict
from ..config.schema import Config, Target
from ..config.targets import instantiate
from ..core.containment import is_contained, report
from ..core.rundir import JOURNAL
from ..errors import ConfigError
from .journal import Journal, JournalFile, JournalLines
from .sink import ResumePoint, Sink, StepRecord, Telemetry
from .vitals import Vitals

__all__ = ["JournalFile", "ResumePoint", "Sink", "StepRecord", "Telemetry", "Vitals", "open_telemetry"]


def open_telemetry(
    config: Config, config_text: str, run_dir: Path, resume: ResumePoint | None
) -> tuple[Telemetry, JournalFile]:
    """The sinks the config asks for, and the file of the journal. `config_text` is the config as YAML."""
    if trackers := list(config.logging.trackers):
        from .trackers import check_available

        check_available(trackers)  # before anything is written
    outside = [_outside_sink(node) for node in config.logging.sinks]
    journal = JournalFile(run_dir / JOURNAL, None if resume is None else resume.journal_position)
    sinks: list[Sink] = [Journal(journal), *_console(config)]
    if config.logging.tensorboard or trackers:
        sinks += _curves(config, config_text, run_dir, resume)
    before = resume or ResumePoint()
    vitals = Vitals(before.num_skipped, before.num_rollbacks)
    return Telemetry(sinks, config.loop.log_every, vitals, outside), journal


def _outside_sink(node: Target) -> Sink:
    sink = instantiate(node)
    if not isinstance(sink, Sink):
        raise ConfigError(
            f"logging.sinks: {node['_target_']} is not a sink. To fix: derive it from safetrain.telemetry.Sink."
        )
    return sink


def _console(config: Config) -> list[Sink]:
    mode = config.logging.console
    if mode == "off" or sys.stdout is None or getattr(sys.stdout, "closed", False):
        return []
    if mode == "json":
        return [JournalLines(sys.stdout, close=False)]
    from .console import Console, is_watched

    if mode == "auto" and is_watched():
        from .live import LiveConsole

        return [LiveConsole(config.loop.log_every)]
    return [Console(None if mode == "incidents" else config.loop.log_every)]


def _curves(config: Config, config_text: str, run_dir: Path, resume: ResumePoint | None) -> list[Sink]:
    settings = to_public_dict(config)
    sinks: list[Sink] = []
    if config.logging.tensorboard:
        sinks += _tensorboard(settings, config_text, run_dir, resume)
    if config.logging.trackers:
        from .trackers import Tracker

        project = config.logging.project or config.name
        sinks += [Tracker(name, project, run_dir, settings) for name in config.logging.trackers]
    return sinks


def _tensorboard(
    settings: Mapping[str, Any], config_text: str, run_dir: Path, resume: ResumePoint | None
) -> list[Sink]:
    """Without it, and with a note, if it cannot be opened: the journal has all of it too."""
    try:
        from .environment import environment
        from .tensorboard import TensorBoard, fenced, table

        texts = {"run/config": fenced(config_text, "yaml"), "run/environment": table(environment())}
        return [TensorBoard(run_dir, settings, texts, resume)]
    except (OSError, UnicodeError, ImportError) as error:
        report(f"TensorBoard is given up, as it could not be opened: {type(error).__name__}: {error}")
    except Exception as error:
        if not is_contained(error, Sink, "opening TensorBoard", "the run goes on without it"):
            raise
    return []
