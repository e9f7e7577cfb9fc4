"""The record of a run: its directory, what has happened so far, and everyone who is told about it."""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import bundle
from .config import to_yaml
from .config.schema import Config
from .errors import Interrupted, TrainingStopped
from .files import to_json, write_text
from .incident import Incident, Outcome, Trigger
from .recovery import Case, Settlement
from .result import FitResult
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
        self.dynamics_steps: deque[int] = deque(maxlen=1000)
        self.rollback_steps: deque[int] = deque(maxlen=1000)
        self.num_restarts = 0
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
            "dynamics_steps": self.dynamics_steps,
            "rollback_steps": self.rollback_steps,
            "num_restarts": self.num_restarts,
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
        self._losses.append(view.loss if view.refused_loss is None else view.refused_loss)
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

    def open_incident(self, view: StepView, decision: Decision) -> Incident:
        """An incident with what is known at once: who refused the step, and why."""
        guard, verdict = next(
            ((g, v) for g, v in decision.by_severity() if v.action > Action.COMMIT and "signal" in v.evidence),
            decision.decisive,
        )
        trigger = Trigger(guard, str(verdict.evidence.get("signal", "")), verdict.evidence.get("value"))
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return Incident(view.step, now, trigger, Outcome(str(decision.action), decision.reasons), rank=self.rank)

    def close_incident(self, case: Case, settlement: Settlement, epoch: int) -> None:
        """Note what was done about a refused step; keep and tell its incident."""
        incident, view = case.incident, case.view
        incident.decision = Outcome(str(settlement.action), [*case.decision.reasons, *settlement.reasons])
        if settlement.action is not Action.COMMIT:
            self.stepped(view, replace(case.decision, action=settlement.action), str(settlement.action), epoch)
        if settlement.action is Action.ROLLBACK:
            self.result.rollbacks += 1
            self.rollback_steps.append(view.step)
            self.num_restarts += case.wants_restart
            self.consecutive_refusals = 0
        if settlement.is_dynamics:
            self.dynamics_steps.append(view.step)
        self.keep(incident)

    def keep(self, incident: Incident) -> None:
        """Add an incident to the record and tell of it."""
        self.result.incidents.append(incident)
        if self.dir is not None and incident.path is not None:
            bundle.write_report(self.dir / incident.path, incident)
        self.telemetry.incident(incident)

    def open_bundle(self, incident: Incident) -> Path | None:
        """Where to put what a replay of the incident needs; None when enough incidents are kept already."""
        if self.dir is None or len(self.result.incidents) >= self.config.forensics.max_incidents:
            return None
        incident.path = f"incidents/{incident.id}"
        return self.dir / incident.path

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        record = {"step": self.step, **metrics}
        self.result.evaluations.append(record)
        if is_best:
            self.result.best = record
        self.telemetry.evaluated(record, is_best)
