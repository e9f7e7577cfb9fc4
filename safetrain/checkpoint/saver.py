"""Saves synchronously, or in a background thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from .copies import Copy
from .state import TrainState
from .store import CheckpointStore


class Saver:
    """Writes one checkpoint at a time, and then calls `tidy` (rotation), always in the background.

    A background save blocks the loop only while the state is copied, and while the previous save is unfinished. Its error
    is raised by the next call of any method.
    """

    def __init__(
        self, store: CheckpointStore, background: bool, published: Callable[[Path], None], tidy: Callable[[], None]
    ) -> None:
        """`published` is called with each new checkpoint as soon as it is safely on disk, `tidy` after it."""
        self.store, self._published, self._tidy = store, published, tidy
        self._copy = Copy() if background else None
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.num_saved = 0
        self.seconds_blocked = 0.0

    def save(self, state: TrainState, about: dict[str, Any], kept: Callable[[TrainState], dict[str, Tensor]]) -> None:
        """`kept`: the values of a state that need not be copied."""
        begin = time.perf_counter()
        try:
            self.wait()
            if self._copy is None:
                self._write(state, about)
                self._start(self._tidy)
            else:
                copied = self._copy.take(state, kept(state))
                self._start(lambda: self._write(copied, about, tidy=True))
        finally:
            self.seconds_blocked += time.perf_counter() - begin

    def poll(self) -> None:
        """Raise the error of the background thread, if it had one."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait(self) -> None:
        """Block until the current save is on disk."""
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
        # A daemon: a second Ctrl-C need not wait for it, and an unpublished checkpoint leaves nothing behind.
        self._thread = threading.Thread(target=self._run_catching, args=(work,), daemon=True)
        self._thread.start()

    def _run_catching(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
