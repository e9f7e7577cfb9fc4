"""The record of a run: its directory, what has happened so far, and the sinks that it is reported to."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Loaded, open_store
from ..checkpoint.compatibility import check_changes
from ..checkpoint.plain import rebuild
from ..config import load_config, to_write, to_yaml
from ..config.private import private_notes, read_digests
from ..config.schema import Config
from ..core import endings, ownership
from ..core.containment import log_warning, reported_to
from ..core.files import to_json, write_text
from ..core.incident import Cause, Incident, Outcome, incident_of
from ..core.result import SAVED_FIELDS as RESULT_FIELDS
from ..core.result import FitResult
from ..core.rundir import (
    CHECKPOINTS,
    CONFIG,
    SUMMARY,
    RunLock,
    create_run_dir,
    existing_run_dir,
    holds_run,
    remove_run_dir,
)
from ..core.verdict import Action, Decision
from ..core.view import StepView
from ..distributed.comm import by_first
from ..errors import Interrupted, RunDirectoryError, TrainingStopped, UsageError
from ..incidents import bundle
from ..recovery import RefusedStep
from ..step.history import History
from ..telemetry import JournalFile, ResumePoint, StepRecord, Telemetry, open_telemetry
from .findings import explained_by_findings, findings_of, note_warnings
from .removed import restore_removed
from .signals import acknowledge, signals_noted


class Run:
    def __init__(
        self,
        config: Config,
        asked_dir: str | Path | bool | None,
        rank: int,
        resume: bool | str = False,
        history: History | None = None,
        is_written: bool = True,
    ) -> None:
        """`resume`: False for a new directory, True or "force" for one that holds a run, "auto" for either.

        Unless `is_written` there is no directory, and no sink is opened.
        """
        self.config, self.rank = config, rank
        self.history = History() if history is None else history
        """What guards see of the steps so far; shared with the `Step`."""
        self.dir: Path | None = None
        self._named_dir: Path | None = None
        self.telemetry = Telemetry()
        self.resumed: Loaded | None = None
        """The checkpoint that this run goes on from."""
        self._journal: JournalFile | None = None
        self._lock: RunLock | None = None
        self._begin = time.perf_counter()
        self.resumption: endings.Resumption | None = None
        """What came before this process, until its first step is committed."""
        self._seconds_before = 0.0
        self._notes: list[str] = []
        self._said: set[str] = set()
        self._wrote_config = False
        self.shared_dir: Path
        """The run's directory, also for processes that do not write into it by themselves."""
        if is_written:
            self._open_dir(asked_dir, resume)
        self.result = FitResult(run_dir=None if asked_dir is False else self._named_dir)
        self.signal: int | None = None
        """The signal that asked the run to end, if one did."""
        self.stop_reason: str | None = None
        """Why this process asks the run to end in the ordinary way."""
        self.evaluated_at = 0
        """Committed steps at the last evaluation; fewer after a rollback to before it."""
        self._losses = array("d")

    def _open_dir(self, asked: str | Path | bool | None, resume: bool | str) -> None:
        """Of several processes the first owns the directory; all go on from the same checkpoint, or all raise."""
        try:
            self._named_dir, self.shared_dir, resume = by_first(lambda: self._claim_dir(asked, resume))
            point = self._find_checkpoint() if resume else None
            by_first(lambda: self._open_files(point))
        except OSError as error:
            self._release()
            raise RunDirectoryError(
                f"the run directory {self._named_dir or asked} cannot be written to: {error}.\n"
                "To fix: free some space or give a directory you can write to (--out or run_dir)."
            ) from error
        except BaseException:
            self._release()
            raise

    def _claim_dir(self, asked: str | Path | bool | None, resume: bool | str) -> tuple[Path, Path, bool]:
        if resume not in (False, True, "auto", "force"):
            raise UsageError(f"resume must be False, True, 'auto' or 'force', not {resume!r}.")
        if resume == "auto":
            resume = isinstance(asked, (str, Path)) and bool(holds_run(asked))
        named = self._named_dir = existing_run_dir(asked) if resume else create_run_dir(asked, self.config.name)
        self.dir = named.absolute()  # user code may change the working directory
        self._lock = RunLock(self.dir)
        if resume:
            recorded = read_digests((self.dir / CONFIG).read_text("utf-8"))
            changed = check_changes(load_config(self.dir / CONFIG), self.config, resume == "force", recorded)
            self._notes += [f"the config was changed for this resume: {change}" for change in changed]
        return named, self.dir, bool(resume)

    def _open_files(self, point: ResumePoint | None) -> None:
        assert self.dir is not None
        if point is None:
            self.write_config()
        self.resumption = None if point is None else endings.of_resumed(self.dir, point.journal_position)
        with reported_to(self._notes.append):
            self.telemetry, self._journal = open_telemetry(self.config, self._config_text, self.dir, point)
        if self._journal.num_missing:
            self._notes.append(
                f"the journal lacks {self._journal.num_missing} bytes of what was written before this resume"
            )

    def _release(self) -> None:
        self.telemetry.close()
        if self._lock is not None:
            self._lock.release()

    def _find_checkpoint(self) -> ResumePoint:
        """Choose the checkpoint to go on from; nothing is changed unless there is one, or the run never had any."""
        store = open_store(self.shared_dir / CHECKPOINTS, self.config.loop.rank_timeout_seconds)
        self.resumed = store.load_newest()
        store.clean()
        if self.resumed is None:
            self._notes.append("this run had no checkpoint yet: it starts from the beginning")
            return ResumePoint()
        self._notes += [f"{name} was passed over: {reason}" for name, reason in self.resumed.passed_over.items()]
        store.set_aside(self.resumed.passed_over)
        record = self.resumed.state.rest["progress"]["run"]
        return ResumePoint(
            self.resumed.manifest.step,
            record["journal_position"],
            record["result"]["skipped"],
            record["result"]["rollbacks"],
        )

    def write_config(self) -> None:
        """Once. Of a resumed run only when its state was found to fit: what fails must leave the run as it was."""
        if self.dir is not None and not self._wrote_config:
            self._wrote_config = True
            write_text(self.dir / CONFIG, self._config_text)
            ownership.mark(self.dir)

    @cached_property
    def _config_text(self) -> str:
        return to_yaml(to_write(self.config))

    def started(self, about: dict[str, Any], notes: Sequence[str]) -> None:
        """Report the start of the run, with one-time notes."""
        self.telemetry.vitals.gauges |= {
            "perf/guards_percent": lambda: (
                100 * (self.result.timing.get("guards", 0.0) + self.history.guard_seconds) / self.seconds
            ),
            "perf/recovery_seconds": lambda: self.result.timing.get("recovery", 0.0),
        }
        if self.resumed is not None:
            about["resumed"] = f"from {self.resumed.path.name}, {self.resumed.manifest.num_committed} steps committed"
        self.telemetry.started(about)
        for note in (*self._notes, *private_notes(self.config), *notes):
            self.say_once(note)

    def say_once(self, text: str, is_warning: bool = False) -> None:
        if text not in self._said:
            self._said.add(text)
            (self.warn if is_warning else self.telemetry.noted)(text)

    def warn(self, text: str) -> None:
        """To all sinks, and in the log: where the program has set up logging, or has no console to see it on."""
        log_warning(text, is_shown=self.config.logging.console != "off")
        self.telemetry.noted(text)

    @property
    def seconds(self) -> float:
        """Of training so far, those before a resume included."""
        return self._seconds_before + time.perf_counter() - self._begin

    @contextmanager
    def phase(self, name: str, doing: str) -> Iterator[None]:
        """Time spent outside the steps: its seconds are counted under that name, and it is shown while it lasts."""
        self.telemetry.doing(doing)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spent(name, time.perf_counter() - begin)
            self.telemetry.doing(None)

    def spent(self, name: str, seconds: float) -> None:
        timing = self.result.timing
        timing[name] = timing.get(name, 0.0) + seconds

    def _count_guard_seconds(self) -> None:
        """Guards have a counter of their own while steps are made: it is cheaper."""
        self.spent("guards", self.history.guard_seconds)
        self.history.guard_seconds = 0.0

    @property
    def out_of_time(self) -> bool:
        """This process has trained for `loop.max_hours`."""
        hours = self.config.loop.max_hours
        return hours is not None and time.perf_counter() - self._begin >= hours * 3600

    def state_dict(self) -> dict[str, Any]:
        """The record so far. What happens later is not part of the state that is saved with it."""
        self._count_guard_seconds()
        result = {name: getattr(self.result, name) for name in RESULT_FIELDS}
        incidents = [dataclasses.asdict(incident) for incident in self.result.incidents]
        return {
            **self.history.state_dict(),
            "losses": torch.frombuffer(self._losses, dtype=torch.float64).clone()
            if self._losses
            else torch.empty(0).double(),
            "result": {**result, "incidents": incidents},
            "seconds": self.seconds,
            "timing": dict(self.result.timing),
            "journal_position": 0 if self._journal is None else self._journal.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = array("d", state["losses"].tolist())
        self.history.load_state_dict(state, step=len(self._losses))
        for name in RESULT_FIELDS:
            setattr(self.result, name, state["result"].get(name, getattr(self.result, name)))
        self.result.incidents = [rebuild(Incident, fields) for fields in state["result"]["incidents"]]
        self._seconds_before = state["seconds"]
        self.result.timing = dict(state.get("timing", {}))

    @property
    def step(self) -> int:
        """Index of the step to attempt next."""
        return len(self._losses)

    @property
    def num_refusals(self) -> int:
        return self.history.num_refusals

    @property
    def losses(self) -> Sequence[float]:
        """One per attempted step."""
        return self._losses

    def view_between_steps(self, epoch: int) -> StepView:
        """Of the step decided last."""
        fields = {"epoch": epoch, **self.history.view_fields()}
        return StepView(max(self.step - 1, 0), self.result.final_loss, math.nan, **fields)

    def note_unlogged(self, names: list[str], where: str = "training_step") -> None:
        """Say once what a step returned that is no metric; empties the list."""
        self.telemetry.noted(f"not logged, because not numeric: {', '.join(names)} (returned by {where})")
        names.clear()

    def trail(self) -> int:
        """A checksum of everything decided so far."""
        r = self.result
        return zlib.crc32(repr((self.step, self.num_refusals, r.steps, r.skipped, r.rollbacks, r.final_loss)).encode())

    def saving(self) -> None:
        """A checkpoint is about to be written, and goes with the files of the record as they are now."""
        if self._lock is not None and self.dir is not None:
            restore_removed(self._lock, self.dir, self._config_text, self._journal, self.warn)
        self.telemetry.saving(self.step, self.result.steps)
        by_first(self.telemetry.sync)

    @contextmanager
    def recorded(self, notes_signals: bool = True) -> Iterator[None]:
        """Whatever ends the run inside, its summary is written and its files are closed."""
        self.result.status = "running"
        try:
            signals = self.config.loop.end_on_signals if notes_signals else None
            with reported_to(self.telemetry.noted), signals_noted(signals, self._asked_to_end):
                yield
            if self.result.status == "running":
                self.result.status, self.result.stop_reason = "done", self.stop_reason
        except BaseException as error:
            is_end = isinstance(error, (Interrupted, KeyboardInterrupt))
            self.result.status = (
                "stopped" if isinstance(error, TrainingStopped) else "interrupted" if is_end else "error"
            )
            raise
        finally:
            self._count_guard_seconds()
            self.result.seconds = self.seconds
            self.result.losses = list(self._losses)
            try:
                if self.dir is not None:
                    write_text(self.dir / SUMMARY, to_json(self.result.summary(), indent=2) + "\n")
            except OSError as error:
                self.warn(f"the summary could not be written: {error}")
            self.telemetry.finished(self.result)
            self._release()
            if self.result.run_dir is None and self.dir is not None:  # a temporary one
                remove_run_dir(self.dir)

    def _asked_to_end(self, signum: int) -> None:
        is_shown = self.rank == 0 and self.config.logging.console != "off"
        self.signal = self.signal or acknowledge(signum, is_shown)

    def stepped(self, view: StepView, decision: Decision, outcome: str) -> None:
        """Note one decided step: `outcome` is the action taken, or `overflow`."""
        self._losses.append(view.loss if view.refused_loss is None else view.refused_loss)
        if outcome == "commit":
            self.result.steps += 1
            self.result.final_loss = view.loss
            if view.grad_norm > view.limits.norm:
                self.result.num_clipped += 1
                self.result.most_clipped = min(self.result.most_clipped, view.limits.norm / view.grad_norm)
            if self.resumption is not None:
                self.resumption = self.resumption.over(self.result)
        else:
            self.result.skipped += 1
        self.result.overflows += outcome == "overflow"
        self.history.decided(view.step, outcome)
        self.telemetry.stepped(StepRecord(view, decision, outcome, self.result.steps))
        if not decision.is_silent and outcome == "commit":
            list(map(self.warn, note_warnings(self.result, findings_of(decision), view.step)))

    def open_incident(self, view: StepView, decision: Decision) -> Incident:
        """An incident with what is known at once: who refused the step, and why."""
        return explained_by_findings(incident_of(view, decision, self.rank), decision)

    def close_incident(self, case: RefusedStep) -> None:
        """Record what was done about a refused step; keep and report its incident."""
        incident, view, resolution = case.incident, case.view, case.resolution
        assert resolution is not None
        incident.decision = Outcome(str(resolution.action), [*case.decision.reasons, *resolution.reasons])
        if resolution.action is not Action.COMMIT and case.is_step:
            self.stepped(view, replace(case.decision, action=resolution.action), str(resolution.action))
        if resolution.action is Action.ROLLBACK:
            self.history.rollback_steps.append(view.step)
            if case.wants_restart:
                self.history.restarted(case.restart_shares)
            self.history.consecutive_refusals = 0
        if resolution.is_dynamics:
            self.history.went_wrong(view.step, case.lr_share)
            if not case.has_non_finite_number and incident.cause.label == "unknown":
                explanation = f"every number was finite, but training diverged: {'; '.join(incident.decision.reasons)}"
                incident.cause = Cause("divergence", explanation)
        self.keep(incident)

    def keep(self, incident: Incident) -> None:
        """Add an incident to the record and report it."""
        self.result.incidents.append(incident)
        if self.dir is not None and incident.path is not None:
            try:
                bundle.write_report(directory := self.dir / incident.path, incident)
                from ..report import write_incident_page  # only a run with incidents pays for the import

                write_incident_page(directory, incident)
            except Exception as error:  # a full disk must not end the run
                self.warn(f"the incident of step {incident.step} could not be written: {error}")
        self.telemetry.incident(incident)

    def open_bundle(self, incident: Incident) -> Path | None:
        """Where to put what a replay of the incident needs; None when enough are kept already, or another rank keeps it."""
        if len(self.result.incidents) >= self.config.forensics.max_incidents:
            return None
        incident.path = f"incidents/{incident.id}"
        return self.shared_dir / incident.path if incident.rank == self.rank else None

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        """Committed steps are those that the weights have in them; budgets and attempts are not rewound."""
        self.result.rollbacks += 1
        self.result.steps_undone += self.result.steps - num_committed
        self.result.steps = num_committed
        self.evaluated_at = min(self.evaluated_at, num_committed)
        self.history.rolled_back()
        self.telemetry.rolled_back(to_step, num_committed, source)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self.evaluated_at = self.result.steps
        self.result.evaluations.append(record := {"step": self.step, **metrics})
        if is_best:
            self.result.best = record
        self.telemetry.evaluated(record, is_best)
