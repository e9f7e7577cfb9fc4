"""Sharded checkpoints, read by one process."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from safetrain.checkpoint import Damaged
from safetrain.checkpoint.shards import METADATA, plain_memory, read_shards


class RunsCode:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_forged_metadata_runs_no_code(tmp_path):
    trace = tmp_path / "trace"
    forged = Metadata(state_dict_metadata={"model/weight": RunsCode(f"touch {trace}")})
    (tmp_path / METADATA).write_bytes(pickle.dumps(forged))
    with pytest.raises(Damaged, match=r"posix\.system"):
        read_shards(tmp_path, plain_memory)
    assert not trace.exists()


def test_dotted_names_in_metadata_are_not_resolved(tmp_path):
    # Protocol 4 can name attributes of what a module has imported: torch.distributed.checkpoint.filesystem -> os.system
    code = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x94\x8c\x09os.system\x94\x93\x94."
    (tmp_path / METADATA).write_bytes(code)
    with pytest.raises(Damaged, match=r"os\.system"):
        read_shards(tmp_path, plain_memory)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense"])
def test_invalid_metadata_is_damaged(tmp_path, content):
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(Damaged):
        read_shards(tmp_path, plain_memory)


def test_plain_memory_has_shape_and_dtype():
    memory = plain_memory("model/weight", torch.Size([2, 3]), torch.bfloat16)
    assert (memory.shape, memory.dtype) == ((2, 3), torch.bfloat16)
