"""The stacks of the threads of this process, and the DataLoader worker that it waits for."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from .._private import dataloader
from .activity import Activity

DEPTH = 12
"""Innermost frames that are shown of each thread."""
ENDED = "it has ended"
WATCHING = ("safetrain-watchdog", "safetrain-mailbox")
"""Names of threads that are not shown."""
OURS = str(Path(__file__).parents[1])
_DUMP = getattr(signal, "SIGRTMIN", 0) + 6 if hasattr(signal, "SIGRTMIN") else 0
"""A worker that inherited the handler writes its stack when it gets this signal."""


def main_frames() -> Iterator[FrameType]:
    """Of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> tuple[str, int, str] | None:
    """File, line and its text: the innermost of the main thread that is neither torch's, nor Python's, nor of this package."""
    fallback = None
    for frame in main_frames():
        file, line = frame.f_code.co_filename, frame.f_lineno or 0  # None on the way into a function
        found = file, line, linecache.getline(file, line).strip()
        fallback = fallback or found
        is_library = "site-packages" in file or file.startswith(("<", sys.base_prefix + os.sep + "lib", OURS))
        if not is_library:
            return found
    return fallback


def all_stacks() -> str:
    """Of every thread of Python, the main one first; without those that watch."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)} (most recent call last):\n{''.join(traceback.format_stack(frame)[-DEPTH:]).rstrip()}"
        for ident, frame in frames
        if not names.get(ident, "").startswith(WATCHING)
    )


class Workers:
    """Makes the worker processes of data loaders able to show their stacks: those that are forked inherit the handler."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    @contextmanager
    def traceable(self) -> Iterator[None]:
        if not _DUMP or threading.current_thread() is not threading.main_thread():
            yield
            return
        with tempfile.TemporaryFile() as self._file:
            faulthandler.register(_DUMP, file=self._file, all_threads=True)
            try:
                yield
            finally:
                faulthandler.unregister(_DUMP)
                self._file = None

    def waited_for(self, activity: Activity) -> str | None:
        """Which worker process, and which samples, the main thread waits for; None if it waits for none."""
        wait = dataloader.waited_for(main_frames())
        if wait is None:
            return None
        samples = activity.samples(wait.batch)
        what = f"batch {wait.batch} of its iterator" if samples is None else f"samples {_shortened(list(samples))}"
        text = f"it waits for loader worker {wait.worker} (pid {wait.pid}{_state(wait.pid)}), which loads {what}"
        stack = self._stack_of(wait.pid)
        return text if not stack else f"{text}\n  the worker's stack (most recent call first):\n{stack}"

    def _stack_of(self, pid: int) -> str:
        """Empty if that process has no handler, or does not answer."""
        if self._file is None or not _catches(pid, _DUMP):
            return ""
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._file.fileno()
            before = os.fstat(descriptor).st_size
            os.kill(pid, _DUMP)
            for _ in range(20):
                time.sleep(0.05)
                size = os.fstat(descriptor).st_size
                if size > before and size == os.fstat(descriptor).st_size:
                    return os.pread(descriptor, 8000, before).decode(errors="replace").rstrip()
        return ""


def process_state(pid: int) -> str:
    """Of a process of this machine, as people say it; empty if it runs or sleeps as usual, or nothing is known."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ENDED if Path("/proc/self").exists() else ""
    except (OSError, IndexError):
        return ""
    known = {
        "T": "it is stopped (SIGSTOP or a debugger)",
        "t": "a debugger holds it",
        "D": "it waits for a disk or a network file system",
        "Z": ENDED,
    }
    return known.get(letter, "")


def _state(pid: int) -> str:
    return f": {state}" if (state := process_state(pid)) else ""


def _catches(pid: int, signum: int) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
        return bool(int(caught, 16) >> (signum - 1) & 1)
    return False


def _shortened(samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return f"{shown}, … ({len(samples)} of them)" if len(samples) > 8 else shown
