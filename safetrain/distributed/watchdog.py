"""Finds out which rank is missing when a collective times out, and at which line of code it hangs.

A thread of each rank reports its phase to the store of the process group, even while the rank hangs. torch's own error
after the timeout names only the connection that failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PERIOD = 0.5
"""Seconds between two heartbeats."""
PATIENCE = 16 * PERIOD
"""Seconds to wait for an answer before a rank is considered gone."""


class Watchdog:
    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._rank, self._world_size, self.timeout_seconds = rank, world_size, timeout_seconds
        self._phase: tuple[str, bool, float] = ("starting", False, time.time())
        self._step = -1
        self._store = _open_store()
        self._failure: str | None = None
        self._main = threading.main_thread().ident
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="safetrain-watchdog", daemon=True)
        if self._store is not None:
            self._thread.start()

    def at(self, phase: str, step: int | None = None, waiting: bool = False) -> None:
        """Set the current phase of this rank. Costs an assignment; the thread reports it."""
        self._phase = (phase, waiting, time.time())
        if step is not None:
            self._step = step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, this rank waits for other ranks."""
        before = self._phase
        self.at(name, waiting=True)
        yield
        self._phase = before

    def failed(self, text: str) -> None:
        """Report to the other ranks what ended this one."""
        self._failure = text
        self._report()

    def close(self) -> None:
        if self._thread.is_alive():
            self._closing.set()
            self._thread.join(5.0)
        self._store = None

    # ---- the thread --------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._closing.wait(PERIOD):
            self._report()

    def _report(self) -> None:
        store, (phase, waiting, since) = self._store, self._phase
        if store is None:
            return
        about = {
            "phase": phase,
            "waiting": waiting,
            "since": since,
            "step": self._step,
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "failure": self._failure,
        }
        with contextlib.suppress(Exception):  # the store is gone if the rank that hosts it is
            store.set(f"rank/{self._rank}", json.dumps(about))
            if store.check(["asked"]):
                store.set(f"stack/{self._rank}", self._own_stack() or "unknown")

    def _own_stack(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        return "".join(traceback.format_stack(frame)[-12:]) if frame is not None else ""

    # ---- who is missing ----------------------------------------------------------------------------------------

    def who_is_missing(self, problem: str) -> str:
        """A message that names the missing ranks, and the line of code each of them is at."""
        head = f"rank {self._rank} waited for the other ranks in vain, at step {self._step}: {problem}"
        if self._store is None:
            return f"{head}\nTo fix: look at the output of the other ranks."
        stacks = self._ask_for_stacks()
        others = {rank: self._about(rank) for rank in range(self._world_size) if rank != self._rank}
        if missing := {rank: about for rank, about in others.items() if about and about["failure"]}:
            lines = [f"rank {rank} failed: {about['failure']}" for rank, about in missing.items()]
            return "\n".join([head, *lines, "To fix: fix what the first of them raised."])
        gone = {r: a for r, a in others.items() if a is None or r not in stacks}
        busy = {r: a for r, a in others.items() if a is not None and r not in gone and not a["waiting"]}
        lines = [f"rank {rank} is gone: {_last_seen(about)}" for rank, about in gone.items()]
        for rank, about in busy.items():
            seconds = time.time() - about["since"]
            lines.append(
                f"rank {rank} is missing: {_where(about)}, for {seconds:.0f} s (pid {about['pid']} on {about['host']})"
            )
            lines.append(f"  its stack (most recent call last):\n{stacks[rank].rstrip()}")
        if not lines:
            lines = [f"rank {rank} was {_where(about)}" for rank, about in others.items() if about]
        fix = f"find out why it is not at the same collective; if it is only slow, raise loop.rank_timeout_seconds ({self.timeout_seconds:g})"
        return "\n".join([head, *lines, f"To fix: {fix}."])

    def _ask_for_stacks(self) -> dict[int, str]:
        """The stack of every other rank that still sends heartbeats."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        stacks: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the rank that hosts the store is gone
            assert self._store is not None
            self._store.set("asked", "1")
            seen = {rank: self._last_heartbeat(rank) for rank in others}
            deadline = time.monotonic() + PATIENCE
            while len(stacks) < len(others) and time.monotonic() < deadline:
                self._closing.wait(PERIOD)
                alive = [rank for rank in others if self._last_heartbeat(rank) != seen[rank]]
                stacks = {rank: stack for rank in alive if (stack := self._get(f"stack/{rank}")) is not None}
                if any(about and about["failure"] for about in map(self._about, others)):
                    break
        return stacks

    def _last_heartbeat(self, rank: int) -> float:
        about = self._about(rank)
        return 0.0 if about is None else float(about["time"])

    def _about(self, rank: int) -> dict[str, Any] | None:
        text = self._get(f"rank/{rank}")
        return None if text is None else json.loads(text)

    def _get(self, key: str) -> str | None:
        try:
            if self._store is None or not self._store.check([key]):
                return None
            return bytes(self._store.get(key)).decode()
        except Exception:  # the rank that hosts the store is gone
            return None


def _open_store() -> Any:
    """A connection of our own to the store of the process group; None if it is not reachable."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return None
    try:
        store = TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False)
    except Exception:  # a process group that was initialised without a TCPStore
        return None
    return PrefixStore("safetrain", store)


def _where(about: dict[str, Any]) -> str:
    return f"in its {about['phase']}" + (f" of step {about['step']}" if about["step"] >= 0 else "")


def _last_seen(about: dict[str, Any] | None) -> str:
    if about is None:
        return "it never sent a heartbeat"
    ago = time.time() - about["time"]
    return f"its last heartbeat was {ago:.0f} s ago, {_where(about)} (pid {about['pid']} on {about['host']})"
