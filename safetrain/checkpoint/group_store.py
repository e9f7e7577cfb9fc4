"""Checkpoints of a run with several processes: one for all ranks, which succeeds or fails on all of them.

Rank 0 writes what is the same on all processes; of a sharded state each process writes its own shard. What differs between
processes is saved too: random state, data cursor, and the buffers of a sharded model. A checkpoint gets its final name
when every shard is on disk. An error of one process is raised on all of them, so that none is left waiting.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.comm import by_first, gather, num_processes, process_rank, together
from ..errors import CheckpointError
from ..tensors.sharded import is_dtensor
from .manifest import NAME, Manifest, read_manifest
from .shards import METADATA, write_shards
from .soundness import peaks_of, problems_in
from .state import TrainState
from .store import REST, BadState, CheckpointStore, Loaded, read_rest, sync_directory, write_bytes, write_rest
from .tensorfile import is_storable


class GroupStore(CheckpointStore):
    """Every process calls `write` and `load_newest`, at the same point of the run. All else is done by rank 0 alone."""

    def __init__(self, directory: Path, timeout_seconds: float) -> None:
        super().__init__(directory)
        # A group of its own: a background save must not interleave with the collectives of the training.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    # ---- writing -----------------------------------------------------------------------------------------------

    def write(self, state: TrainState, about: dict[str, Any]) -> Path:
        parts = gather(state.own_part(), self._group)
        state = TrainState(state.tensors, {**state.rest, "processes": parts})
        if any(is_dtensor(tensor) for tensor in state.tensors.values()):
            return self._write_shards(state, about)
        return by_first(lambda: super(GroupStore, self).write(state, about), self._group)

    def _write_shards(self, state: TrainState, about: dict[str, Any]) -> Path:
        problems = problems_in(peaks_of(state.tensors), state.rest["born_bad"])
        if found := {name: what for each in gather(problems, self._group) for name, what in each.items()}:
            raise BadState(found)
        final, temporary = by_first(lambda: self._begin(about["step"]), self._group)
        try:
            files = together(lambda: write_shards(temporary, state.tensors, self._group), self._group)
            by_first(lambda: _publish(temporary, final, state, about, files), self._group)
        finally:
            if process_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
        return final

    def _begin(self, step: int) -> tuple[Path, Path]:
        final, temporary = self.new_names(step)
        temporary.mkdir()
        return final, temporary

    def point(self, link: str, target: Path) -> None:
        if process_rank() == 0:
            super().point(link, target)

    def rotate(self, keep: Callable[[list[tuple[Path, Manifest]]], set[Path]]) -> None:
        if process_rank() == 0:
            super().rotate(keep)

    def clean(self) -> None:
        if process_rank() == 0:
            super().clean()

    def set_aside(self, names: Iterable[str]) -> None:
        if process_rank() == 0:
            super().set_aside(names)

    # ---- reading -----------------------------------------------------------------------------------------------

    def _newest_first(self) -> list[Path]:
        return by_first(super()._newest_first, self._group)

    def _load_candidate(self, path: Path) -> Loaded:
        loaded = self._load_together(path)
        loaded.state.become_that_of(process_rank(), num_processes())
        return loaded

    def _load_together(self, path: Path) -> Loaded:
        """Raises the same error on all processes."""
        manifest = by_first(lambda: read_manifest(path), self._group)
        if METADATA not in manifest.files:
            return self._load_from_first(path)
        names = sorted(manifest.files)[process_rank() :: num_processes()]
        together(lambda: manifest.verify_files(path, names), self._group)
        rest = by_first(lambda: read_rest(path), self._group)
        return Loaded(path, manifest, TrainState({}, rest, shards=path))

    def _load_from_first(self, path: Path) -> Loaded:
        """Rank 0 reads and broadcasts: the others need not have access to its disk."""
        found: list[Loaded] = []

        def load() -> tuple[Manifest, dict[str, Any], dict[str, Any]]:
            found.append(self.load(path))
            loaded = found[0]
            about = {
                name: (tuple(tensor.shape), tensor.dtype) if is_storable(tensor) else tensor
                for name, tensor in loaded.state.tensors.items()
            }
            return loaded.manifest, loaded.state.rest, about

        manifest, rest, about = by_first(load, self._group)
        tensors: dict[str, Tensor] = {}
        for name, each in about.items():
            if isinstance(each, Tensor):
                tensors[name] = each
                continue
            tensors[name] = found[0].state.tensors[name] if found else torch.empty(each[0], dtype=each[1])
            if tensors[name].numel():
                dist.broadcast(tensors[name].view(-1).view(torch.uint8), 0, group=self._group)
        return Loaded(path, manifest, TrainState(tensors, rest))


def open_store(directory: Path, timeout_seconds: float) -> CheckpointStore:
    """The store for this number of processes; all of them must open it."""
    return CheckpointStore(directory) if num_processes() == 1 else GroupStore(directory, timeout_seconds)


def _publish(
    temporary: Path, final: Path, state: TrainState, about: dict[str, Any], parts: list[dict[str, dict[str, Any]]]
) -> None:
    files = {name: entry for part in parts for name, entry in part.items()}
    if sorted(files) != sorted(path.name for path in temporary.iterdir()):
        raise CheckpointError(
            f"the shards of a checkpoint are not all in {temporary.parent}: the processes do not see the same disk.\n"
            "To fix: choose a run directory (--out or run_dir) on a file system that all of them share."
        )
    files[REST] = write_rest(temporary / REST, state.rest, {})
    write_bytes(temporary / NAME, Manifest(**about, files=files).render().encode())
    sync_directory(temporary)
    os.rename(temporary, final)
    sync_directory(final.parent)
