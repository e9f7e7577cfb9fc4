"""The record of a run: its directory, what has happened so far, and everyone who is told about it."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .batch import map_tensors
from .config import to_yaml
from .config.schema import Config
from .errors import Interrupted, TrainingStopped
from .files import replacing, to_json, write_text
from .incident import Incident, Outcome, Trigger
from .result import FitResult
from .rng import RandomState
from .rundir import CONFIG, SUMMARY, create_run_dir
from .telemetry import StepRecord, Telemetry, open_telemetry
from .verdict import Action, Decision
from .view import StepView


class Run:
    def __init__(self, config: Config, asked_dir: str | Path | None, rank: int) -> None:
        self.config, self.rank = config, rank
        self.dir = create_run_dir(asked_dir, config.name) if rank == 0 else None
        if self.dir is not None:
            write_text(self.dir / CONFIG, to_yaml(config))
        self.telemetry: Telemetry = open_telemetry(config, self.dir)
        self.result = FitResult(run_dir=self.dir)
        self.signal: int | None = None
        """The signal that asked the run to end, if one did."""
        self.consecutive_refusals = 0
        self.consecutive_overflows = 0
        self.num_refusals = 0
        self.refused_steps: deque[int] = deque(maxlen=1000)
        self._losses = array("d")

    @property
    def step(self) -> int:
        """Index of the step to attempt next."""
        return len(self._losses)

    def history(self, scaler_overflow: bool) -> dict[str, Any]:
        """What a view of the next step says about the steps before it."""
        return {
            "consecutive_refusals": self.consecutive_refusals,
            "refused_steps": self.refused_steps,
            "consecutive_overflows": self.consecutive_overflows + 1 if scaler_overflow else 0,
        }

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Whatever ends the run inside, its summary is written and its files are closed."""
        begin = time.perf_counter()
        self.result.status = "error"
        try:
            with self._signals_noted():
                yield
            self.result.status = "done"
        except TrainingStopped:
            self.result.status = "stopped"
            raise
        except (Interrupted, KeyboardInterrupt):
            self.result.status = "interrupted"
            raise
        finally:
            self.result.seconds = time.perf_counter() - begin
            self.result.losses = list(self._losses)
            if self.dir is not None:
                write_text(self.dir / SUMMARY, to_json(self.result.summary(), indent=2) + "\n")
            self.telemetry.finished(self.result)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """SIGINT and SIGTERM let the step finish; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return

        def note(signum: int, frame: object) -> None:
            self.signal = signum
            for number, handler in before.items():
                signal.signal(number, handler)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stepped(self, view: StepView, decision: Decision, outcome: str, epoch: int) -> None:
        """Note one decided step: `outcome` is the action taken, or `overflow`."""
        self._losses.append(view.loss)
        committed = outcome == "commit"
        if committed:
            self.result.steps += 1
            self.result.final_loss = view.loss
        else:
            self.result.skipped += 1
        if outcome == "overflow":
            self.result.overflows += 1
            self.consecutive_overflows += 1
        elif committed:
            self.consecutive_overflows = self.consecutive_refusals = 0
        else:
            self.consecutive_refusals += 1
            self.num_refusals += 1
            self.refused_steps.append(view.step)
        self.telemetry.stepped(StepRecord(view, decision, outcome, self.result.steps, epoch))

    def incident(
        self, view: StepView, decision: Decision, window: Sequence[Any], random_state: RandomState | None
    ) -> Incident:
        """Make, keep and tell an incident."""
        guard, verdict = next(
            ((g, v) for g, v in decision.by_severity() if v.action > Action.COMMIT and "signal" in v.evidence),
            decision.decisive,
        )
        trigger = Trigger(guard, str(verdict.evidence.get("signal", "")), verdict.evidence.get("value"))
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        incident = Incident(view.step, now, trigger, Outcome(str(decision.action), decision.reasons), rank=self.rank)
        self._write_bundle(incident, window, random_state)
        self.result.incidents.append(incident)
        self.telemetry.incident(incident)
        return incident

    def _write_bundle(self, incident: Incident, window: Sequence[Any], random_state: RandomState | None) -> None:
        if self.dir is None or len(self.result.incidents) >= self.config.forensics.max_incidents:
            return
        incident.path = f"incidents/{incident.id}"
        directory = self.dir / incident.path
        write_text(directory / "incident.json", to_json(incident.to_dict(), indent=2) + "\n")
        if random_state is not None:
            batches = [
                map_tensors(batch, lambda item: item.cpu() if hasattr(item, "cpu") else item) for batch in window
            ]
            contents = {"random_state": random_state.to_plain(), "window": batches}
            with replacing(directory / "replay.pt") as path:
                try:
                    torch.save(contents, path)
                except (pickle.PicklingError, AttributeError, TypeError):  # a batch of objects that cannot be pickled
                    torch.save({**contents, "window": None}, path)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        record = {"step": self.step, **metrics}
        self.result.evaluations.append(record)
        if is_best:
            self.result.best = record
        self.telemetry.evaluated(record, is_best)
