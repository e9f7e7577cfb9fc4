"""Writes a checkpoint from host memory, when the device of a run can no longer be read."""

from __future__ import annotations

import contextlib

from ..distributed.comm import num_processes
from .manifest import Damaged, read_manifest
from .saver import Saver
from .snapshots import SnapshotRing
from .store import BadState, CheckpointStore


def write_newest_trusted(store: CheckpointStore, saver: Saver | None, snapshots: SnapshotRing) -> str:
    """Write the newest trusted snapshot as a checkpoint, unless there is one as new. Says what there is now."""
    newest = 0
    with contextlib.suppress(Damaged, IndexError):
        newest = read_manifest(store.paths()[-1]).num_committed
    snapshot = snapshots.newest_trusted()
    about = None if snapshot is None else snapshot.about
    if saver is None or num_processes() > 1 or snapshot is None or about is None or about["num_committed"] < newest:
        return f"The newest checkpoint is that after step {newest}" if newest else "There is no checkpoint"
    try:
        saver.wait()
        store.point("last", store.write(snapshot.state, about))
    except (OSError, BadState) as problem:
        return f"The snapshot of the state after step {about['num_committed']} could not be written: {problem}"
    return f"The state after step {about['num_committed']}, from the host's memory, was written as a checkpoint"
