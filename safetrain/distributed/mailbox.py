"""What each rank reports of itself in the store of the process group, where the others find it even while it hangs."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from .restarted import attempt

PERIOD = 0.5
"""Seconds between two signs of life."""
MAX_PER_SECOND = 1000
"""Signs of life of all ranks together that the store is given: with more ranks each gives fewer."""


def period(world_size: int) -> float:
    return max(PERIOD, world_size / MAX_PER_SECOND)


class Mailbox:
    def __init__(self, store: Any) -> None:
        self._store = store

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def put(self, rank: int, about: dict[str, Any]) -> None:
        self.set(f"rank/{rank}", json.dumps(about))

    def about(self, rank: int) -> dict[str, Any] | None:
        """What that rank reported last; None if nothing, or if the rank that hosts the store is gone."""
        text = self.get(f"rank/{rank}")
        return None if text is None else json.loads(text)

    def set(self, key: str, text: str) -> None:
        with contextlib.suppress(Exception):  # the store is gone if the rank that hosts it is
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return bytes(self._store.get(key)).decode()
        except Exception:  # the rank that hosts the store is gone
            return None

    def has(self, key: str) -> bool:
        try:
            return self._store is not None and bool(self._store.check([key]))
        except Exception:
            return False

    def close(self) -> None:
        self._store = None


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
