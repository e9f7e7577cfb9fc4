"""Adds the watchdog's findings to the record of the run."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from ..config.schema import LoopConfig
from ..distributed.stragglers import Straggler
from ..distributed.watchdog import Hang, HangListener
from ..step.exchange import Exchange
from .run import Run

EARLIER = 0.9
"""Of `loop.rank_timeout_seconds`: a rank that hangs ends by itself before the others end their waiting, so that all can save."""


class HangReports(HangListener):
    def __init__(self, run: Run) -> None:
        self._run = run

    def hangs(self, hang: Hang) -> None:
        logging.getLogger("safetrain").warning("%s", hang.text)
        about = hang.to_dict()
        self._run.result.hangs.append({key: about[key] for key in ("step", "unit", "seconds", "usual", "ranks")})
        self._run.telemetry.hangs(about)

    def straggles(self, slow: Straggler) -> None:
        self._run.result.stragglers.append(asdict(slow))
        self._run.telemetry.noted(slow.describe())

    def went_on(self, hang: Hang, seconds: float) -> None:
        about: dict[str, Any] = {
            "step": hang.step,
            "unit": hang.late.unit,
            "seconds": round(seconds, 2),
            "over": True,
        }
        text = f"it no longer hangs: the {hang.late.unit} at step {hang.step} had taken {seconds:.0f} s"
        self._run.result.hangs[-1]["seconds"] = about["seconds"]
        self._run.telemetry.hangs({**about, "ranks": hang.ranks, "text": text})


def watching_for_hangs(run: Run, exchange: Exchange, loop: LoopConfig) -> AbstractContextManager[None]:
    limit = loop.hang_timeout_seconds
    if limit is None and exchange.world_size > 1:
        limit = EARLIER * loop.rank_timeout_seconds
    return exchange.watchdog.watching(HangReports(run), limit)
