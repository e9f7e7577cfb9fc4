"""The lock in the directory of a run."""

import os

import pytest

from safetrain.core.rundir import LOCK, RunLock
from safetrain.errors import RunDirectoryError


def test_a_lock_without_calls_that_windows_lacks(tmp_path, monkeypatch):
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name, raising=False)
    lock = RunLock(tmp_path)
    owner = f"process {os.getpid()} on "
    assert (tmp_path / LOCK).read_text().startswith(owner)
    with pytest.raises(RunDirectoryError, match="which is this one"):
        RunLock(tmp_path)
    (tmp_path / LOCK).unlink()
    assert not lock.is_intact
    assert lock.renew() is False
    assert (tmp_path / LOCK).read_text().startswith(owner)
    lock.release()
