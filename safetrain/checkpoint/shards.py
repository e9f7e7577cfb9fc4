"""The tensors of a sharded state, saved and loaded by `torch.distributed.checkpoint`.

Each process writes its shard to a file of its own, `__<rank>_0.distcp`; `.metadata` records what is where. The state can be
loaded by any number of processes, sharded in any way, or unsharded by a single one.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.comm import num_processes, process_rank
from .manifest import Damaged, checksum

METADATA = ".metadata"
_METADATA_TYPES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
SAFE_NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_TYPES),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
}
"""The only names that unpickling `.metadata` may look up."""


def write_shards(directory: Path, tensors: Mapping[str, Tensor], group: Any) -> dict[str, dict[str, Any]]:
    """Write this process's files, flushed to disk; returns sizes and checksums. Every process must call it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(directory, sync_files=True)
    # What is replicated (buffers, counters) is written by rank 0, whose values are those of the run.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # a BaseException, and the same on all processes
        raise OSError(_first_line(error)) from error
    mine = [path for path in directory.iterdir() if path.name.startswith(f"__{process_rank()}_")]
    if process_rank() == 0:
        mine.append(directory / METADATA)
    return {path.name: {"bytes": path.stat().st_size, "xxh3_128": checksum(path)} for path in mine}


def read_shards(directory: Path, memory_for: Callable[[str, torch.Size, torch.dtype], Tensor]) -> dict[str, Tensor]:
    """Every tensor by name, loaded into the memory (whole, or a DTensor's shard) that `memory_for` returns for it.

    Every process must call it. Raises Damaged on all of them.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(directory)
    try:
        found = reader.read_metadata().state_dict_metadata
        tensors = {
            name: memory_for(name, about.size, about.properties.dtype)
            for name, about in found.items()
            if isinstance(about, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended in a single process
            load(tensors, storage_reader=reader, no_dist=num_processes() == 1)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException; a forged file may raise anything
        raise Damaged(f"it cannot be loaded: {_first_line(error)}") from error
    return tensors


def plain_memory(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`memory_for` of a process that loads whole tensors."""
    return torch.empty(shape, dtype=dtype)


def _reader(directory: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        """Unpickles `.metadata` without running code; torch reads the tensors themselves with `weights_only`."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(directory / METADATA, "rb") as file:
                metadata = _SafeUnpickler(file).load()
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(directory)


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in SAFE_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which no checkpoint does")


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    first = next((wrapped[0] for wrapped in failures.values()), error)
    return (str(first).strip() or type(first).__name__).splitlines()[0]
