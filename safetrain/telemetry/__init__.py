"""Who hears about a run: journal, console, TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

from ..config.schema import Config
from ..rundir import JOURNAL
from .journal import Journal
from .sink import Sink, StepRecord, Telemetry

__all__ = ["StepRecord", "Telemetry", "open_telemetry"]


def open_telemetry(config: Config, run_dir: Path | None) -> Telemetry:
    """The sinks the config asks for; none on ranks that have no run directory."""
    if run_dir is None:
        return Telemetry([])
    journal = open(run_dir / JOURNAL, "x", encoding="utf-8")  # noqa: SIM115 (the journal closes it when the run ends)
    sinks: list[Sink] = [Journal(journal)]
    mode = config.logging.console
    if mode == "json":
        sinks.append(Journal(sys.stdout, close=False))
    elif mode != "off":
        from .console import Console

        sinks.append(Console(config.loop.log_every, plain_text=mode == "plain"))
    if config.logging.tensorboard:
        from .tensorboard import TensorBoard

        sinks.append(TensorBoard(run_dir, config.loop.log_every))
    return Telemetry(sinks)
