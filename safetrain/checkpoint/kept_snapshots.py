"""Saves the snapshots of a run to disk, so that a resumed run can roll back to the same steps as the uninterrupted one.

    snapshots/step-00000450/   a snapshot, in the form of a checkpoint

They belong to the newest checkpoint, which lists them. A snapshot of the very moment of a checkpoint is that checkpoint, linked or
named; each other one is written once, with the first checkpoint that needs it, and deleted with the last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .copies import Copy
from .frozen_file import FrozenFile
from .manifest import Damaged
from .snapshots import Snapshot, SnapshotRing
from .soundness import peaks_of
from .state import TrainState
from .store import BadState, CheckpointStore

DIRECTORY = "snapshots"
_MARKS = ("step", "num_healthy", "trusted", "used")


Moment = tuple[int, ...]
"""Equal only if nothing that is saved has changed."""


class KeptSnapshots:
    def __init__(self, run_dir: Path, frozen: FrozenFile, warn: Callable[[str], None]) -> None:
        self._store, self._warn = CheckpointStore(run_dir / DIRECTORY, frozen), warn
        self._taken: dict[int, Moment] = {}
        """When the snapshots were taken, by their step."""
        self._saved: dict[Moment, Path] = {}
        self._listed: dict[str, Any] | None = None

    def taken(self, ring: SnapshotRing, moment: Moment) -> None:
        self._taken = {snapshot.step: self._taken.get(snapshot.step, moment) for snapshot in ring.all()}

    def listed(self, ring: SnapshotRing, moment: Moment, about: dict[str, Any]) -> list[dict[str, Any]]:
        """Write the snapshots that are not on disk yet; returns what the checkpoint of this moment, written next, says of all."""
        here = next((step for step, taken in self._taken.items() if taken == moment), None)
        ring.order()
        for snapshot in ring.all():
            snapshot.memory.finish()
        others = [snapshot for snapshot in ring.all() if snapshot.step != here]
        try:
            self._write(others, about)
        except (OSError, BadState) as error:
            self._warn(f"snapshots could not be written, so that a resume cannot go back to them: {error}")
        return [
            {name: getattr(snapshot, name) for name in _MARKS}
            | {"is_first": snapshot is ring.first, "is_checkpoint": snapshot.step == here}
            for snapshot in ring.all()
        ]

    def _write(self, snapshots: Iterable[Snapshot], about: dict[str, Any]) -> None:
        self._store.clean()
        for snapshot in snapshots:
            path = self._store.directory / f"step-{snapshot.step:08d}"
            if path.exists():
                continue
            self._store.directory.mkdir(parents=True, exist_ok=True)
            twin = self._saved.get(self._taken.get(snapshot.step, ()))
            if twin is None or not _linked(twin, path):
                steps = snapshot.state.rest["num_committed"]
                self._store.write(
                    snapshot.state, {**about, "step": snapshot.step, "num_committed": steps, "metric": None}
                )

    def published(self, path: Path, moment: Moment, listed: list[dict[str, Any]]) -> None:
        """A checkpoint with this list is on disk: delete the snapshots that it does not need."""
        self._saved = {each: p for each, p in self._saved.items() if each in self._taken.values()} | {moment: path}
        self._keep_only(listed)

    def _keep_only(self, listed: list[dict[str, Any]]) -> None:
        needed = {f"step-{marks['step']:08d}" for marks in listed}
        for kept in self._store.paths():
            if kept.name not in needed:
                shutil.rmtree(kept, ignore_errors=True)

    def restore(
        self, path: Path, listed: list[dict[str, Any]], ring: SnapshotRing, now: TrainState, moment: Moment
    ) -> None:
        """The ring as it was when this list was saved in the checkpoint at `path`. `now` is the state of that moment."""
        self._keep_only(listed)  # later ones of a killed process may come out otherwise after a forced change
        found: list[Snapshot] = []
        missing = []
        for marks in listed:
            state = now
            if not marks["is_checkpoint"]:
                try:
                    state = self._store.load(self._store.directory / f"step-{marks['step']:08d}").state
                except Damaged as problem:
                    missing.append(f"{marks['step']} ({problem})")
                    continue
            memory = Copy()
            kept = Snapshot(marks["step"], memory, memory.take(state, ring.kept(state)), peaks_of(state.tensors))
            kept.num_healthy, kept.trusted, kept.used = marks["num_healthy"], marks["trusted"], marks["used"]
            if marks["is_first"]:
                ring.first = kept
            else:
                found.append(kept)
            self._taken[kept.step] = moment if marks["is_checkpoint"] else ()
        ring.put_back(found)
        self._saved[moment] = path
        if missing:
            self._warn(
                f"snapshots from before this resume are missing, and cannot be gone back to: {', '.join(missing)}"
            )


def _linked(checkpoint: Path, path: Path) -> bool:
    """Another name for the files of a checkpoint, which stays when that is rotated away. Not on every file system."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        for file in checkpoint.iterdir():
            os.link(file, temporary / file.name)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        return False
    return True
