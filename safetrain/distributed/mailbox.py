"""Each rank's heartbeat and status in the store of the process group, readable by the others even while it hangs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from .restarted import attempt

PERIOD = 0.5
"""Seconds between two signs of life."""
ANSWER_SECONDS = 5.0
"""After this long without an answer the store counts as gone, until it answers."""
MAX_PER_SECOND = 1000
"""Signs of life of all ranks together that the store is given: with more ranks each gives fewer."""


def period(world_size: int) -> float:
    return max(PERIOD, world_size / MAX_PER_SECOND)


class Mailbox:
    def __init__(self, store: Any) -> None:
        self._store = store
        self._asked: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._unanswered: _Request | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        return self._store is not None

    @property
    def answers(self) -> bool:
        """False while the store does not: the machine that hosts it is stopped, or cannot be reached."""
        return self._unanswered is None or self._unanswered.done.is_set()

    def put(self, rank: int, about: dict[str, Any]) -> None:
        self.set(f"rank/{rank}", json.dumps(about))

    def about(self, rank: int) -> dict[str, Any] | None:
        """What that rank reported last; None if nothing, or if the store is gone."""
        text = self.get(f"rank/{rank}")
        return None if text is None else json.loads(text)

    def set(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(key, text))

    def get(self, key: str) -> str | None:
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else bytes(found).decode()

    def close(self) -> None:
        self._store = None
        self._asked.put(_Request(lambda store: None))

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        """None if the store is gone. It waits for no answer when the network is cut: a request to it may last for ever."""
        if self._store is None or not self.answers:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="safetrain-mailbox", daemon=True)
            self._thread.start()
        request = _Request(call)
        self._asked.put(request)
        if not request.done.wait(ANSWER_SECONDS):
            self._unanswered = request
        return request.answer

    def _serve(self) -> None:
        while True:
            request, store = self._asked.get(), self._store
            if store is None:
                return request.done.set()
            with contextlib.suppress(Exception):  # the store is gone if the process that hosts it is
                request.answer = request.call(store)
            request.done.set()


class _Request:
    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call, self.answer, self.done = call, None, threading.Event()


def open_mailbox() -> Mailbox:
    """A connection of our own to the store of the process group; a closed one if it is not reachable."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return Mailbox(None)
    try:
        store = TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False)
    except Exception:  # a process group that was initialised without a TCPStore
        return Mailbox(None)
    # What an earlier attempt of this run has left in the store of its launcher is not of these processes.
    return Mailbox(PrefixStore(f"safetrain/{attempt()}", store))
