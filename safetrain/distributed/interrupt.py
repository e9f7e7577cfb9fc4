"""Interrupts the waiting main thread from another thread: by an exception if possible, else by ending the process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import HangError

GRACE_SECONDS = 20.0
"""After this long, a process that cannot be interrupted is ended."""
_SIGNAL = getattr(signal, "SIGURG", None)
"""Ends a system call that waits, and means nothing by itself."""


class Interruption:
    def __init__(self) -> None:
        self._reason: str | None = None
        self._since = 0.0
        self._thread: int | None = None

    @contextmanager
    def possible(self) -> Iterator[None]:
        """Inside, `demand` raises in this thread, if it is the main one: only that runs Python's signal handlers."""
        if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(_SIGNAL, self._raise)
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = self._reason = None
            signal.signal(_SIGNAL, before)

    def _raise(self, signum: int, frame: object) -> None:
        if (reason := self._reason) is not None:
            self._reason = None
            raise HangError(
                f"{reason}: longer than loop.hang_timeout_seconds or loop.rank_timeout_seconds allow.\n"
                "To fix: find out what it waits for at the line that the traceback shows; if it is only slow, raise the limit."
            )

    def demand(self, reason: str) -> None:
        """Called again and again while it is to end. Ends the process if the thread cannot be interrupted."""
        if self._thread is None or _SIGNAL is None:
            return
        now = time.monotonic()
        if not self._since:
            self._since, self._reason = now, reason
            signal.pthread_kill(self._thread, _SIGNAL)
        elif self._reason is not None and now - self._since > GRACE_SECONDS:
            logging.getLogger("safetrain").critical("%s: it cannot be interrupted, so the process ends", reason)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed, or the disk is full
                    stream.flush()
            os._exit(1)

    def cancel(self) -> None:
        """It went on by itself."""
        self._reason, self._since = None, 0.0
