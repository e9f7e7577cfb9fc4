"""Saves now, or in a thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .snapshots import Copy
from .state import TrainState
from .store import CheckpointStore


class Saver:
    """Writes one checkpoint at a time, and tidies up after it.

    In the background the loop waits only while the state is copied, and for the checkpoint before it if that is not
    finished yet. An error is raised by the next call of any method. Tidying up is always done in the background.
    """

    def __init__(
        self,
        store: CheckpointStore,
        background: bool,
        published: Callable[[Path], None],
        tidy: Callable[[], None],
    ) -> None:
        """`published` is called with each new checkpoint as soon as it is safely on disk, then `tidy`."""
        self.store, self._published, self._tidy = store, published, tidy
        self._copy = Copy() if background else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.num_saved = 0
        self.seconds_blocked = 0.0

    def save(self, state: TrainState, about: dict[str, Any]) -> None:
        begin = time.perf_counter()
        try:
            self.wait()
            if self._copy is None:
                self._write(state, about)
                self._start(self._tidy)
            else:
                copied = self._copy.take(state)
                self._start(lambda: self._write(copied, about, tidy=True))
        finally:
            self.seconds_blocked += time.perf_counter() - begin

    def poll(self) -> None:
        """Raise the error of the thread, if it had one. Costs nothing."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until what was to be saved is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def _write(self, state: TrainState, about: dict[str, Any], tidy: bool = False) -> None:
        path = self.store.write(state, about)
        self.num_saved += 1
        self._published(path)
        if tidy:
            self._tidy()

    def _start(self, work: Callable[[], object]) -> None:
        # A daemon: a user who wants out at once does not wait for it, and what it has not published never existed.
        self._thread = threading.Thread(target=self._noting_errors, args=(work,), daemon=True)
        self._thread.start()

    def _noting_errors(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
