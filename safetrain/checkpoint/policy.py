"""Keeps what a run must not lose: checkpoints on disk, and snapshots in memory to roll back to.

Changes no number: with or without it, and however often it saves, the weights come out the same.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..core.rundir import CHECKPOINTS
from ..core.verdict import Action, Verdict
from ..distributed.collective import by_first, gather, num_processes, of_first, process_rank
from ..errors import CheckpointError, UsageError
from . import BadState, Manifest, Saver, open_store, save_weights
from .manifest import Damaged, read_manifest
from .snapshots import SnapshotAudit, SnapshotRing
from .state import TrainState, check_dense

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer

MEMORY_SHARE = 0.25
"""Of the machine's memory that snapshots may take."""


class Keeper:
    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer, self._run = trainer, trainer.run
        self._config = trainer.config.checkpoint
        self.snapshots = SnapshotRing(self._config.snapshots, self._config.trust_after)
        self.rejected: dict[str, str] = {}
        """What was wrong with the state when the last snapshot was due; empty if it was taken."""
        self._store = open_store(self._run.shared_dir / CHECKPOINTS, trainer.config.loop.rank_timeout_seconds)
        self._saver = None
        if self._config.enabled:
            self._saver = Saver(self._store, self._config.async_, self._published, self._tidy)
        self._saved: tuple[int, ...] | None = None
        self._saved_steps = self._snapshot_steps = 0
        self._saved_time = time.monotonic()
        self._seen = (0, 0)
        self._is_finishing = False
        self.needs_warm_up = False
        """A pass through the model has to come before the first step."""

    # ---- between steps -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take up the state resumed from, or save the one that the run starts with: that it can be saved is known at once."""
        if self._saver is not None or self._config.snapshot_every is not None or self._config.save_final:
            check_dense(self._trainer.model)
        if (resumed := self._run.resumed) is not None:
            resumed.state.restore_progress(self._trainer)
            resumed.state.restore_training(self._trainer)
            resumed.state.tensors.clear()  # they are the trainer's now; no need for two copies
            self._run.write_config()
            self._saved = self._moment()
            self._saved_steps = self._run.result.steps
            # The sum of two numbers is the same in any order.
            is_ordered = self._trainer.engine.replicas is not None and resumed.state.rest.get("ddp_has_order")
            self.needs_warm_up = num_processes() > 2 and bool(is_ordered)
        else:
            self._run.write_config()
            self.save(required=True)
        self._seen = (self._run.result.steps, self._run.num_refusals)
        if self._config.snapshot_every is not None:
            self._take_snapshot()

    def after_step(self) -> None:
        """Save and copy what is due. Costs a few comparisons when nothing is."""
        self._count_steps()
        steps = self._run.result.steps
        every = self._config.snapshot_every
        if every is not None and steps // every > self._snapshot_steps // every:
            self._trainer._settle()
            self._take_snapshot()
        if self._saver is None:
            return
        if num_processes() == 1:  # several learn of an error together, at the next save: a thread ends when it likes
            self._guarded(self._saver.poll)
        if self._is_due(steps):
            self.save()

    def _count_steps(self) -> None:
        """Tell the snapshots how it went since they were taken."""
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

    def save(self, required: bool = False) -> None:
        """Write a checkpoint of this moment, unless there is one.

        One that is `required` is on disk when this returns, or an error is raised whatever `checkpoint.on_error` says.
        """
        self._trainer._settle()
        if self._saver is None:
            return
        if self._saved != self._moment():
            self._saved, self._saved_steps = self._moment(), self._run.result.steps
            self._saved_time = time.monotonic()
            with self._run.phase("saving", "saving a checkpoint"):
                self._guarded(self._write, required)
        if required:
            self._guarded(self._saver.wait, required)

    def _write(self) -> None:
        assert self._saver is not None
        self._run.telemetry.saving(self._run.step, self._run.result.steps)
        by_first(self._run.telemetry.sync)
        self._saver.save(TrainState.gather(self._trainer), self._about())

    def _moment(self) -> tuple[int, ...]:
        """Equal only if nothing that is saved has changed."""
        result = self._run.result
        return self._run.step, len(result.evaluations), self._trainer.stream.epoch, result.rollbacks

    def _about(self) -> dict[str, Any]:
        result, monitor = self._run.result, self._trainer.config.loop.monitor
        last = result.evaluations[-1] if result.evaluations else None
        metric = None if last is None or last["step"] != self._run.step or math.isnan(last[monitor]) else last[monitor]
        return {
            "step": self._run.step,
            "num_committed": result.steps,
            "epoch": self._trainer.stream.epoch,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "version": __version__,
            "metric": metric,
        }

    def _published(self, path: Path) -> None:
        self._store.point("last", path)

    def _tidy(self) -> None:
        """Old checkpoints go, after a new one is safely on disk. Runs in a thread of its own."""
        self._store.rotate(self._kept)

    def _kept(self, sound: list[tuple[Path, Manifest]]) -> set[Path]:
        config, sign = self._config, 1.0 if self._trainer.config.loop.monitor_mode == "min" else -1.0
        # Of several of one step the last is the one: it also knows of the evaluation, or of the end of the epoch.
        sound = list({manifest.step: (path, manifest) for path, manifest in sound}.values())
        ranked = sorted((sign * m.metric, index) for index, (_, m) in enumerate(sound) if m.metric is not None)
        if ranked:
            self._store.point("best", sound[ranked[0][1]][0])
        kept = {path for path, _ in sound[-config.keep_last :]}
        kept |= {sound[index][0] for _, index in ranked[: config.keep_best]}
        if config.keep_every is not None:
            seen: set[int] = set()
            for path, manifest in sound:
                if (mark := manifest.num_committed // config.keep_every) > 0 and mark not in seen:
                    kept.add(path)
                    seen.add(mark)
        return kept

    def _guarded(self, action: Any, required: bool = False) -> None:
        """Do something that writes; what may go wrong ends the run only if it must."""
        try:
            action()
        except BadState as bad:
            self._refuse(bad.problems)
        except OSError as error:
            self._saved = None
            newest = self._store.paths()[-1:]
            kept = f"the newest one, {newest[0].name}, is intact" if newest else "there is none yet"
            message = f"a checkpoint could not be written at step {self._run.step}: {error}; {kept}"
            if required or self._config.on_error == "stop":
                raise CheckpointError(
                    f"{message}.\nTo fix: make room or mend the run directory, then go on with safetrain resume."
                ) from error
            self._run.warn(f"{message}; training goes on (checkpoint.on_error=warn)")

    def _refuse(self, problems: dict[str, str]) -> None:
        """The state is not sound: that is never saved. The run goes back, or stops loudly where there is nothing to go back to."""
        bad = self._trainer.audit.bad_state() or problems
        what = ", ".join(f"{name} ({problem})" for name, problem in list(bad.items())[:5])
        verdict = Verdict(
            Action.STOP if self._is_finishing else Action.ROLLBACK,
            reason=f"the training state is not sound and was not saved: {what}",
            evidence={"signal": "state", "value": math.nan, "bad_state": bad},
        )
        self._trainer.distrusted(verdict)

    def finish(self) -> None:
        """The last checkpoint, and the final weights for whoever wants nothing else."""
        self._is_finishing = True
        self.save(required=True)
        if self._saver is None and (bad := self._trainer.audit.bad_state()):
            self._refuse(bad)
        if self._config.save_final:
            directory, trainer = self._store.directory, self._trainer
            self._guarded(lambda: save_weights(directory, trainer.model, trainer.ema), required=True)

    def close(self, error: BaseException | None) -> None:
        """Join the writing thread, unless the user wants out at once; what it has not published then never existed."""
        ring, saver = self.snapshots, self._saver
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
            numbers = {"num_saved": saver.num_saved, "seconds_blocked": round(saver.seconds_blocked, 4)}
            self._run.result.checkpoints = {**numbers, **self._verified()}

    def _verified(self) -> dict[str, Any]:
        """The newest checkpoint, read again and compared with what was written."""
        newest = self._store.paths()[-1:] if process_rank() == 0 else []
        if not newest:
            return {}
        try:
            read_manifest(newest[0]).verify_files(newest[0])
        except Damaged as problem:
            self._run.warn(f"the newest checkpoint, {newest[0].name}, is damaged: {problem}")
            return {"newest": newest[0].name, "verified": False}
        return {"newest": newest[0].name, "verified": True}

    # ---- memory ------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        self._snapshot_steps = self._run.result.steps
        rejected_before, self.rejected = bool(self.rejected), {}
        with _nothing_collected():
            state = TrainState.gather(self._trainer, progress=False)
            if self.snapshots.first is None:
                self._fit_into_memory(state.num_bytes)
            audit = self.snapshots.take(self._run.step, state, allow_growth=rejected_before, agree=_agreed)
        if audit.is_fatal:
            self._refuse(audit.problems)
        elif audit.problems:
            self.rejected = audit.problems
            what = ", ".join(f"{name} {problem}" for name, problem in list(self.rejected.items())[:5])
            self._run.warn(f"no snapshot was taken at step {self._run.step}, the state looks odd: {what}")

    def _fit_into_memory(self, num_bytes: int) -> None:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return
        room = min(gather(int(MEMORY_SHARE * total / max(num_bytes, 1)) - 1))
        if room < self._config.snapshots:
            size = max(room, 1)
            self.snapshots = SnapshotRing(size, self._config.trust_after)
            self._run.warn(
                f"one copy of the training state takes {num_bytes / 2**30:.1f} GB, so only {size} and the first one are kept in "
                f"memory instead of checkpoint.snapshots={self._config.snapshots}"
            )

    def rollback(self, to: str, skip_windows: int) -> int:
        """See `SafeTrainer.rollback`."""
        self._trainer._settle()
        step, state = self._earlier_state(to)
        state.restore_training(self._trainer)
        self._trainer._clear_gradients()
        self._trainer.stream.skip(skip_windows * self._trainer.config.loop.grad_accum)
        steps = state.rest["num_committed"]
        self._run.rolled_back(step, steps, to)
        self._trainer._evaluated_at = min(self._trainer._evaluated_at, steps)
        self._saved_steps, self._snapshot_steps = min(self._saved_steps, steps), min(self._snapshot_steps, steps)
        self._seen = (steps, self._run.num_refusals)
        return step

    def _earlier_state(self, to: str) -> tuple[int, TrainState]:
        if to == "disk":
            if self._saver is not None:
                self._guarded(self._saver.wait)
            if (loaded := self._store.load_newest()) is not None:
                return loaded.manifest.step, loaded.state
        elif to in ("trusted", "first"):
            if (snapshot := self.snapshots.pick(restart=to == "first")) is not None:
                return snapshot.step, snapshot.state
        else:
            raise UsageError(f"a rollback goes to 'trusted', 'first' or 'disk', not to {to!r}.")
        raise CheckpointError(
            "there is no state to go back to.\nTo fix: set checkpoint.snapshot_every or checkpoint.enabled."
        )


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without Python's garbage collector: with thousands of tensors it would start several times, and go through every object of
    the process, which takes longer than the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _agreed(audit: SnapshotAudit) -> SnapshotAudit:
    """What is wrong with the state of one process is wrong with the state of the run."""
    audits = gather(audit)
    problems = {name: problem for each in audits for name, problem in each.problems.items()}
    return SnapshotAudit(problems, is_fatal=any(each.is_fatal for each in audits))
