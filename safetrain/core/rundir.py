"""The directory of a run. A new run never writes into an old one, and two processes never write into the same."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from ..errors import RunDirectoryError

CONFIG, JOURNAL, SUMMARY, CHECKPOINTS, LOCK = "config.yaml", "journal.jsonl", "summary.json", "checkpoints", ".lock"


def holds_run(path: str | Path) -> list[str]:
    """Which of a run's files are there."""
    return [name for name in (CONFIG, JOURNAL, SUMMARY) if (Path(path) / name).exists()]


def free_run_dir(asked: str | Path) -> Path:
    """The directory asked for, or the first of `<asked>-2`, `<asked>-3`, … that holds no run."""
    path, number = Path(asked), 1
    while holds_run(path):
        number += 1
        path = Path(asked).with_name(f"{Path(asked).name}-{number}")
    return path


def create_run_dir(asked: str | Path | bool | None, name: str) -> Path:
    """Make the directory asked for, or `runs/<name>-<time>` below the current one; False: a temporary one, for `remove_run_dir`."""
    if asked is False:
        return Path(tempfile.mkdtemp(prefix="safetrain-"))
    try:
        if asked is not None:
            path = Path(str(asked))
            path.mkdir(parents=True, exist_ok=True)
            if held := holds_run(path):
                raise RunDirectoryError(
                    f"{path} already holds a run (it has {', '.join(held)}), and a run is never overwritten.\n"
                    "To fix: choose another directory, leave it out to get a new one below runs/, or go on with that run by "
                    "safetrain resume or fit(resume=True)."
                )
            return path
        safe_name = re.sub(r"[^\w.-]+", "_", name).strip("._") or "run"
        first = Path("runs") / f"{safe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, attempt = first, 1
        while True:
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                if path.parent.exists() and not path.parent.is_dir():
                    raise
                attempt += 1
                path = first.with_name(f"{first.name}-{attempt}")
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory cannot be made: {error}.\nTo fix: give a directory you can write to (--out or run_dir)."
        ) from error


def remove_run_dir(path: Path) -> None:
    """A temporary one."""
    shutil.rmtree(path, ignore_errors=True)


def existing_run_dir(asked: str | Path | bool | None) -> Path:
    """The directory of a run to go on with."""
    if asked is None or isinstance(asked, bool):
        raise RunDirectoryError(
            "to resume, the run's directory must be known.\nTo fix: give it (--out DIR, or run_dir=… of the trainer)."
        )
    path = Path(asked)
    if not (path / CONFIG).is_file():
        what = "holds no run (it has no config.yaml)" if path.is_dir() else "does not exist"
        raise RunDirectoryError(f"{path} {what}.\nTo fix: give the directory of the run to resume.")
    return path


class RunLock:
    """Held by the process that writes into a run's directory. The system releases it when the process dies, however it dies."""

    _held: ClassVar[set[Path]] = set()  # a process is never refused by its own lock, so those are looked up here

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve() / LOCK
        if self.holds(self._path):
            raise self._in_use(f"process {os.getpid()}, which is this one")
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {directory} cannot be written to: {error}.\nTo fix: give a directory you can write to."
            ) from error
        try:
            if not _lock(self._descriptor):
                raise self._in_use(_owner(self._descriptor))
            self._sign()
        except RunDirectoryError:
            os.close(self._descriptor)
            raise
        self._held.add(self._path)
        _remove_left_overs(self._path.parent)

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Whether this process holds the lock in that file."""
        return path in cls._held

    def release(self) -> None:
        if self._path in self._held:
            self._held.discard(self._path)
            os.close(self._descriptor)

    @property
    def is_intact(self) -> bool:
        """The file is there, and the one that was locked: neither it nor the directory was removed."""
        try:
            return os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino
        except OSError:
            return False

    def renew(self) -> bool:
        """Lock it again after it was removed, with its directory if that is gone too: then True. Raises RunDirectoryError if another
        process has taken it since: two must not write into one directory."""
        was_removed = not self._path.parent.is_dir()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock(descriptor):
            owner = _owner(descriptor)
            os.close(descriptor)
            raise self._in_use(f"{owner} too, since {LOCK} was removed while this run was in it")
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._sign()
        return was_removed

    def _sign(self) -> None:
        """Write into the file who holds it."""
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only the name in it is missing
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)  # there is no os.pwrite on Windows
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def _in_use(self, owner: str) -> RunDirectoryError:
        return RunDirectoryError(
            f"{self._path.parent} is being written to by {owner}.\nTo fix: wait until that run has ended, or end it first."
        )


def is_in_use(directory: Path) -> bool:
    """Whether a process is writing into it now. To write, take a RunLock: this only looks."""
    path = directory.resolve() / LOCK
    if RunLock.holds(path):  # by this process, which would let go of it by closing the file below
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, 200).decode(errors="replace").strip() or "another process"


def _remove_left_overs(directory: Path) -> None:
    """Half-written files of a process that was killed."""
    for path in (*directory.glob(".*.tmp"), *directory.glob("incidents/*/.*.tmp")):
        if re.fullmatch(r"\..+\.\d+\.tmp", path.name) and not path.is_dir():
            with contextlib.suppress(OSError):
                path.unlink()


def _lock(descriptor: int, shared: bool = False) -> bool:
    """A lock of this process, not inherited by its children; without a system that has such locks, none is taken."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.lockf(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True
