"""When a checkpoint is saved, which checkpoints are kept, and where a rollback goes. Changes no number: with or without
it, and however often it saves, the weights come out the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from ..config.schema import Config
from ..core.numbers import gibibytes
from ..core.result import FitResult
from ..core.rundir import CHECKPOINTS
from ..core.verdict import Action, Verdict
from ..data.stream import BatchStream
from ..distributed.comm import gather, num_processes, of_first, process_rank
from ..errors import CheckpointError, UsageError
from ..optim.hooks import before_step
from ..tensors.devices import is_host
from .buffers import check_dense
from .compatibility import as_saved
from .group_store import open_store
from .hidden_state import warn_of_unsaved
from .host_memory import host_memory
from .kept_snapshots import KeptSnapshots
from .rescue import write_newest_trusted
from .rotation import chosen
from .saver import Saver
from .settings import noting_settings
from .snapshots import SnapshotRing, agreed, gc_paused
from .state import Stateful, TrainingParts, TrainState
from .store import BadState, Loaded
from .weights import save_weights

MEMORY_SHARE = 0.25
"""Of the machine's memory that snapshots may take."""


class RunRecord(Protocol):
    """The record of a run, as far as saving concerns it."""

    result: FitResult
    shared_dir: Path

    @property
    def step(self) -> int: ...

    @property
    def num_refusals(self) -> int: ...

    def phase(self, name: str, doing: str) -> AbstractContextManager[None]: ...

    def saving(self) -> None: ...

    def warn(self, text: str) -> None: ...

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None: ...


class CheckpointPolicy:
    """What is wrong with the state, when it is about to be saved, is returned as a verdict: the caller recovers or stops."""

    def __init__(
        self, config: Config, parts: TrainingParts, stream: BatchStream, run: RunRecord, progress: Stateful
    ) -> None:
        """`progress`: what a resume needs in addition to the parts, and a rollback leaves where it is."""
        self._config, self._loop = config.checkpoint, config.loop
        self._parts, self._stream, self._run, self._progress = parts, stream, run, progress
        self.snapshots = SnapshotRing(self._config.snapshots, self._config.trust_after)
        self.rejected: dict[str, str] = {}
        """What was wrong with the state when the last snapshot was due; empty if it was taken."""
        self._store = open_store(run.shared_dir / CHECKPOINTS, config.loop.rank_timeout_seconds)
        self._saver: Saver | None = None
        if self._config.enabled:
            tidy = partial(
                self._store.rotate, partial(chosen, self._store, config.checkpoint, config.loop.monitor_mode)
            )
            self._saver = Saver(self._store, self._config.async_, self._published, tidy)
        self._kept_snapshots: KeptSnapshots | None = None
        if self._saver is not None and self._config.save_snapshots and num_processes() == 1:
            self._kept_snapshots = KeptSnapshots(run.shared_dir, self._store.frozen, run.warn)
        self._ring: list[dict[str, Any]] = []
        self._unsaved: set[str] = set()
        self._used: set[int] = set()
        """Steps of states that the run went back to, or that led to that: if trouble returns, it goes to an older one."""
        self._saved: tuple[int, ...] | None = None
        self._saved_steps = self._snapshot_steps = 0
        self._saved_time = time.monotonic()
        self._seen = (0, 0)
        self._is_finishing = False
        # Snapshots are copied during the next forward and backward pass; the update after them waits.
        self._hook = before_step(parts.optimizer, lambda *_: self.snapshots.order())

    @property
    def saves(self) -> bool:
        return self._saver is not None

    # ---- between steps -----------------------------------------------------------------------------------------

    def begin(self, resumed: Loaded | None) -> Verdict | None:
        """Load the state to resume from, or save the initial one, so that a state that cannot be saved is reported at once."""
        if self._saver is not None or self._config.snapshot_every is not None or self._config.save_final:
            check_dense(self._parts.model)
        problem = None
        if resumed is not None:
            with as_saved(resumed.path), noting_settings(self._parts.optimizer, self._run.warn):
                resumed.state.restore_progress(self._progress)
                resumed.state.restore_training(self._parts)
            self._store.remember(resumed)
            resumed.state.tensors.clear()  # they are the model's now; no need for two copies
            self._saved = self._moment()
            self._saved_steps = self._run.result.steps
            self._restore_ring(resumed)
        else:
            problem = self.save(required=True)
        self._seen = (self._run.result.steps, self._run.num_refusals)
        if problem is None and self._config.snapshot_every is not None and self.snapshots.first is None:
            problem = self._take_snapshot()
        return problem

    def _restore_ring(self, resumed: Loaded) -> None:
        """What a rollback could go back to when the checkpoint was saved, it can after the resume."""
        saved = resumed.state.rest.get("ring")
        if saved is None or self._kept_snapshots is None or self._config.snapshot_every is None:
            return
        now = TrainState.gather(self._parts, self._run.result.steps)
        self._fit_into_memory(now)
        self._kept_snapshots.restore(resumed.path, saved["snapshots"], self.snapshots, now, self._moment())
        self._used, self._snapshot_steps = set(saved["used"]), saved["snapshot_steps"]

    def after_step(self, settle: Callable[[], object]) -> Verdict | None:
        """Save and copy what is due. Costs a few comparisons when nothing is. `settle`: called before."""
        self._count_steps()
        steps = self._run.result.steps
        every = self._config.snapshot_every
        if every is not None and steps // every > self._snapshot_steps // every:
            settle()
            if (problem := self._take_snapshot()) is not None:
                return problem
        if self._saver is None:
            return None
        if self._saver.error is not None and num_processes() == 1:  # several learn of it together, at the next save
            if (problem := self._guarded(self._saver.poll)) is not None:
                return problem
        if self._is_due(steps):
            settle()
            return self.save()
        return None

    def _count_steps(self) -> None:
        """Let the snapshots know how the steps since they were taken went."""
        steps, refusals = self._seen
        self._seen = (self._run.result.steps, self._run.num_refusals)
        if self._seen[1] > refusals:
            self.snapshots.refused()
        elif self._seen[0] > steps:
            self.snapshots.committed(self._seen[0] - steps)

    def _is_due(self, steps: int) -> bool:
        config, result = self._config, self._run.result
        if config.every_steps is not None and steps // config.every_steps > self._saved_steps // config.every_steps:
            return True
        # Processes agree on what may be different in each, and only when it may be.
        if config.keep_best and result.evaluations and result.evaluations[-1]["step"] == self._run.step:
            is_best = result.best is not None and result.best["step"] == self._run.step
            if of_first(is_best and self._saved != self._moment()):
                return True
        if config.every_minutes is None:
            return False
        return of_first(time.monotonic() - self._saved_time >= config.every_minutes * 60)

    # ---- disk --------------------------------------------------------------------------------------------------

    def save(self, required: bool = False) -> Verdict | None:
        """Write a checkpoint of this moment, unless there is one.

        One that is `required` is on disk when this returns, or an error is raised whatever `checkpoint.on_error` says.
        """
        if self._saver is None:
            return None
        problem = None
        if self._saved != self._moment():
            self._saved, self._saved_steps = self._moment(), self._run.result.steps
            self._saved_time = time.monotonic()
            with self._run.phase("saving", "saving a checkpoint"):
                problem = self._guarded(self._write, required)
        if required and problem is None:
            problem = self._guarded(self._saver.wait, required)
        return problem

    def _write(self) -> None:
        assert self._saver is not None
        self._run.saving()
        steps = self._run.result.steps
        state = TrainState.gather(self._parts, steps, self._progress)
        if self._kept_snapshots is not None:
            self._saver.wait()
            self._ring = self._kept_snapshots.listed(self.snapshots, self._moment(), self._about())
            state.rest["ring"] = {
                "snapshots": self._ring,
                "used": sorted(self._used),
                "snapshot_steps": self._snapshot_steps,
            }
        self._saver.save(state, self._about(), self.snapshots.kept)

    def _published(self, path: Path) -> None:
        self._store.point("last", path)
        if self._kept_snapshots is not None and self._saved is not None:
            self._kept_snapshots.published(path, self._saved, self._ring)

    def _moment(self) -> tuple[int, ...]:
        """Equal only if nothing that is saved has changed."""
        result = self._run.result
        return self._run.step, len(result.evaluations), self._stream.epoch, result.rollbacks

    def _about(self) -> dict[str, Any]:
        result, monitor = self._run.result, self._loop.monitor
        last = result.evaluations[-1] if result.evaluations else None
        metric = None if last is None or last["step"] != self._run.step or math.isnan(last[monitor]) else last[monitor]
        return {
            "step": self._run.step,
            "num_committed": result.steps,
            "epoch": self._stream.epoch,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "version": __version__,
            "metric": metric,
        }

    def _guarded(self, action: Callable[[], object], required: bool = False) -> Verdict | None:
        """An OSError ends the run only if `required` or on_error=stop."""
        try:
            action()
        except BadState as bad:
            return self._unsound(bad.problems)
        except OSError as error:
            self._saved = None
            kept = next((f"the newest one, {p.name}, is intact" for p in self._store.paths()[-1:]), "there is none yet")
            message = f"a checkpoint could not be written at step {self._run.step}: {error}; {kept}"
            if required or self._config.on_error == "stop":
                raise CheckpointError(
                    f"{message}.\nTo fix: make room or repair the run directory, then go on with safetrain resume."
                ) from error
            self._run.warn(f"{message}; training goes on (checkpoint.on_error=warn)")
        return None

    def _unsound(self, problems: dict[str, str]) -> Verdict:
        """Such a state is never saved: the run goes back, or stops where there is nothing to go back to."""
        bad = self._parts.bad_state() or problems
        what = ", ".join(f"{name} ({problem})" for name, problem in list(bad.items())[:5])
        return Verdict(
            Action.STOP if self._is_finishing else Action.ROLLBACK,
            reason=f"the training state is not sound and was not saved: {what}",
            evidence={"signal": "state", "value": math.nan},
            bad_state=bad,
        )

    def finish(self) -> Verdict | None:
        """The last checkpoint, and the final weights as a file of their own."""
        self._is_finishing = True
        if (problem := self.save(required=True)) is not None:
            return problem
        if self._saver is None and (bad := self._parts.bad_state()):
            return self._unsound(bad)
        if self._config.save_final:
            directory, parts = self._store.directory, self._parts
            return self._guarded(
                lambda: save_weights(directory, parts.model, parts.optimizer, parts.ema), required=True
            )
        return None

    def close(self, error: BaseException | None) -> None:
        """Join the writing thread, unless the user interrupted; what it has not published then never existed."""
        ring, saver = self.snapshots, self._saver
        self._hook.remove()
        self._run.result.snapshots = {
            "num_taken": ring.num_taken,
            "seconds": round(ring.seconds, 4),
            "bytes": ring.num_bytes,
        }
        if saver is not None:
            if not isinstance(error, KeyboardInterrupt):
                try:
                    saver.wait()
                except (OSError, BadState) as problem:
                    self._run.warn(f"the last checkpoint could not be written: {problem}")
            seconds = round(saver.seconds_blocked, 4)
            self._run.result.checkpoints = {
                "num_saved": saver.num_saved,
                "seconds_blocked": seconds,
                **self._verified(),
            }

    def _verified(self) -> dict[str, Any]:
        """The newest checkpoint, read again and compared with what was written."""
        if process_rank() != 0 or not (newest := self._store.paths()[-1:]):
            return {}
        if (problem := self._store.problem_of(newest[0])) is not None:
            self._run.warn(f"the newest checkpoint, {newest[0].name}, is damaged: {problem}")
        return {"newest": newest[0].name, "verified": problem is None}

    # ---- memory ------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> Verdict | None:
        self._snapshot_steps = self._run.result.steps
        warn_of_unsaved(self._parts.optimizer, self._unsaved, self._run.warn)
        rejected_before, self.rejected = bool(self.rejected), {}
        with gc_paused():
            # A device may be lost. With the data cursor and the record, the snapshot can be resumed from.
            may_be_lost = any(not is_host(p.device) for p in self._parts.model.parameters())
            progress, about = (self._progress, self._about()) if may_be_lost else (None, None)
            state = TrainState.gather(self._parts, self._run.result.steps, progress)
            if self.snapshots.first is None:
                self._fit_into_memory(state)
            audit = self.snapshots.take(
                self._run.step,
                state,
                allow_growth=rejected_before,
                agree=agreed,
                about=about,
                at_once=self._written_in_forward(state),
            )
        if self._kept_snapshots is not None:
            self._kept_snapshots.taken(self.snapshots, self._moment())
        if audit.is_fatal:
            return self._unsound(audit.problems)
        if audit.problems:
            self.rejected = audit.problems
            what = ", ".join(f"{name} {problem}" for name, problem in list(self.rejected.items())[:5])
            self._run.warn(f"no snapshot was taken at step {self._run.step}, the state is suspicious: {what}")
        return None

    def renew_first(self) -> None:
        """The state now is the one that training begins with."""
        self.snapshots.forget()
        self._take_snapshot()

    def rescue(self) -> str:
        """The device is lost: see `write_newest_trusted`. Says what there is now."""
        return write_newest_trusted(self._store, self._saver, self.snapshots)

    def _written_in_forward(self, state: TrainState) -> set[str]:
        """What a forward pass may write, which comes before the next update."""
        written = {*state.rest["buffers"], *(f"model/{name}" for name in self._parts.written_in_forward)}
        return written | {name for name in state.tensors if name.startswith("transient/")}

    def _fit_into_memory(self, state: TrainState) -> None:
        if (total := host_memory()) is None:
            return
        num_bytes = state.num_bytes - (shared := state.num_frozen_bytes)
        room = min(gather(int((MEMORY_SHARE * total - shared) / max(num_bytes, 1)) - 1))
        if room < self._config.snapshots:
            size = max(room, 1)
            self.snapshots = SnapshotRing(size, self._config.trust_after)
            self._run.warn(
                f"one copy of the training state takes {gibibytes(num_bytes)}, so only {size} and the first one are kept in "
                f"memory instead of checkpoint.snapshots={self._config.snapshots}"
            )

    def rollback(self, to: str, skip_windows: int = 0) -> tuple[int, int]:
        """Restore an earlier state; returns the step it is of, and how many committed steps it has in it."""
        step, state = self._earlier_state(to)
        self._parts.clear_gradients()  # first: they take as much room as the weights
        self.snapshots.order()
        state.restore_training(self._parts)
        self._used |= {step, *(s for s in map(self._store.step_of, self._store.paths()) if s > step)}
        self.snapshots.forget_after(step)
        self._stream.skip(skip_windows * self._loop.grad_accum)
        steps = state.rest["num_committed"]
        self._run.rolled_back(step, steps, to)
        self._saved_steps, self._snapshot_steps = min(self._saved_steps, steps), min(self._snapshot_steps, steps)
        self._seen = (steps, self._run.num_refusals)
        return step, steps

    def _earlier_state(self, to: str) -> tuple[int, TrainState]:
        if to == "disk":
            if self._saver is not None:
                self._guarded(self._saver.wait)
            if (loaded := self._store.load_newest(self._used)) is not None:
                return loaded.manifest.step, loaded.state
        elif to in ("trusted", "first"):
            if to == "trusted" and self.snapshots.is_used_up and self._has_older_checkpoint():
                raise CheckpointError("every snapshot was gone back to already; there are older states on disk.")
            if (snapshot := self.snapshots.pick(restart=to == "first")) is not None:
                return snapshot.step, snapshot.state
        else:
            raise UsageError(f"a rollback goes to 'trusted', 'first' or 'disk', not to {to!r}.")
        raise CheckpointError(
            "there is no state to go back to.\nTo fix: set checkpoint.snapshot_every or checkpoint.enabled."
        )

    def _has_older_checkpoint(self) -> bool:
        first = self.snapshots.first
        return first is not None and any(0 <= self._store.step_of(path) < first.step for path in self._store.paths())
