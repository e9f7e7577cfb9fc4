"""The watchdog thread: reports a phase that takes much longer than usual, with the line where it hangs.

With several processes every rank reports itself to the others through the store of the process group, even while it hangs,
so that the one that is behind can be named with its line of code. torch's own error after the timeout names a connection.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .activity import Activity, Late
from .interrupt import Interruption
from .mailbox import Mailbox, open_mailbox, period
from .stacks import ENDED, Workers, all_stacks, process_state, user_line
from .stragglers import Straggler

ANSWER_SECONDS = 2.5
"""Time that ranks are given to report themselves before one that does not is considered gone."""


@dataclass(frozen=True)
class Hang:
    """Something takes many times as long as usual."""

    late: Late
    step: int
    text: str
    ranks: list[int] = field(default_factory=list)
    """Those that the others wait for."""
    places: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each of them: phase, file, line, code, pid, host, stacks, as far as known."""

    def to_dict(self) -> dict[str, Any]:
        about = {
            "step": self.step,
            "unit": self.late.unit,
            "seconds": round(self.late.seconds, 2),
            "usual": self.late.usual,
        }
        return {**about, "ranks": self.ranks, "places": self.places, "text": self.text}


class HangListener:
    """Called from the watchdog's thread, except for `straggles`."""

    def straggles(self, slow: Straggler) -> None:
        """Once for each rank and phase, on all ranks."""

    def hangs(self, hang: Hang) -> None:
        """Once for each, on one rank: the first, or another if that is gone."""

    def went_on(self, hang: Hang, seconds: float) -> None:
        """On every rank: it took this long in the end."""


@dataclass
class Survey:
    """What the other ranks say of themselves."""

    abouts: dict[int, dict[str, Any]]
    stacks: dict[int, str]
    gone: list[int]
    """Those that have given no sign of life since they were asked."""

    @property
    def behind(self) -> list[int]:
        """Ranks that the others wait for: gone, or alive and not yet at a collective that others have begun."""
        progress = {rank: about["progress"] for rank, about in self.abouts.items() if rank not in self.gone}
        first = max(progress.values(), default=0)
        late = [rank for rank, number in progress.items() if number < first]
        if not late and not self.gone:
            late = [rank for rank, about in self.abouts.items() if not about["waiting"]]
            late = [] if len(late) == len(self.abouts) > 1 else late
        return sorted([*late, *self.gone])


class Watchdog:
    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        timeout_seconds: float = 0.0,
        progress: Callable[[], int] = lambda: 0,
        mailbox: Mailbox | None = None,
    ) -> None:
        """`timeout_seconds`: after which the collectives of other ranks end their waiting. `progress`: how many this one has begun."""
        self.rank, self.world_size, self.timeout_seconds, self._progress = rank, world_size, timeout_seconds, progress
        self.activity, self.workers, self._interruption = Activity(), Workers(), Interruption()
        self._mailbox = mailbox or (open_mailbox() if world_size > 1 else Mailbox(None))
        self._period = period(world_size)
        self._failure: str | None = None
        self._answered: str | None = None
        self._listener: HangListener | None = None
        self._limit: float | None = None
        self._late: Late | None = None
        self._hang: Hang | None = None
        """What was reported of it, by this process."""
        self._examined = -1
        """The number of the late unit that was examined last."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="safetrain-watchdog", daemon=True)
        if self._mailbox.is_open:
            self._thread.start()

    @contextmanager
    def watching(self, listener: HangListener, limit_seconds: float | None) -> Iterator[None]:
        """Inside, what takes much longer than usual is reported. After `limit_seconds` it raises HangError in this process, if others do
        not have to wait for it: the traceback then shows where it was."""
        self._limit = limit_seconds
        with self.workers.traceable(), self._interruption.possible():
            self._listener = listener
            if self._thread.ident is None:
                self._thread.start()
            try:
                yield
            finally:
                self._listener = None
                self._look_back(listener)
                if not self._mailbox.is_open:
                    self.close()

    def straggles(self, slow: Straggler) -> None:
        if self._listener is not None:
            self._listener.straggles(slow)

    def failed(self, text: str) -> None:
        """Report to the other ranks what ended this one."""
        self._failure = text
        self._report()

    def close(self) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._closing.set()
            self._thread.join(5.0)
        self._mailbox.close()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            try:
                self._report()
                self._look()
            except Exception as error:
                logging.getLogger("safetrain").warning("the watchdog failed: %s: %s", type(error).__name__, error)
            if self._closing.wait(self._period):
                return

    def _report(self) -> None:
        if not self._mailbox.is_open:
            return
        self._mailbox.put(self.rank, self._about())
        asked = self._mailbox.get("asked")
        if asked is not None and asked != self._answered:
            self._answered = asked
            self._mailbox.set(f"stack/{asked}/{self.rank}", self._stacks())

    def _about(self) -> dict[str, Any]:
        activity = self.activity
        return {
            "phase": activity.phase,
            "waiting": activity.is_waiting,
            "seconds": time.monotonic() - activity.since,
            "where": activity.where(),
            "step": activity.step,
            "progress": self._progress(),
            "line": user_line(),
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "failure": self._failure,
        }

    def _stacks(self) -> str:
        waits = self.workers.waited_for(self.activity)
        return "\n".join(filter(None, (waits, all_stacks())))

    # ---- what is late ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        listener, late = self._listener, self.activity.late()
        self._look_back(listener)
        if late is None or listener is None:
            return
        self._late = late
        if self._examined != late.number:
            self._examined, self._hang = late.number, self._hang_of(late)
            if self._hang is not None:
                listener.hangs(self._hang)
        if self._limit is not None and late.seconds >= self._limit and self._is_behind():
            self._interruption.demand(f"{late.describe()}, {self.activity.where()}")

    def _look_back(self, listener: HangListener | None) -> None:
        """Has what was late come to its end?"""
        if self._late is None or self.activity.number == self._late.number:
            return
        hang, seconds = self._hang, self._late.seconds
        self._late = self._hang = None
        self._interruption.cancel()
        if hang is not None and listener is not None:
            listener.went_on(hang, seconds)

    def _hang_of(self, late: Late) -> Hang | None:
        """None if another rank reports it."""
        if not self._mailbox.is_open:
            return self._describe(late, Survey({self.rank: self._about()}, {self.rank: self._stacks()}, []))
        if self.rank > 0 and 0 not in self._survey([0]).gone:
            return None
        survey = self._survey()
        if any(rank < self.rank for rank in survey.abouts if rank not in survey.gone):
            return None
        hang = self._describe(late, survey)
        self._mailbox.set("behind", json.dumps([self.activity.step, hang.ranks]))
        return hang

    def _is_behind(self) -> bool:
        """Whether this process is one that the others wait for."""
        if not self._mailbox.is_open:
            return True
        found = self._mailbox.get("behind")
        return found is not None and self.rank in json.loads(found)[1] and not self.activity.is_waiting

    def _describe(self, late: Late, survey: Survey) -> Hang:
        ranks, step = survey.behind, self.activity.step
        head = f"hangs: {late.describe()}" + (f", at step {step}" if step >= 0 else "")
        if self.world_size > 1 and not ranks:
            head += "; no rank is behind the others: they wait for the same thing, or cannot reach each other"
        shown = ranks or sorted(survey.abouts)
        places = {rank: self._place(rank, survey) for rank in shown}
        return Hang(late, step, "\n".join([head, *(self._line(rank, survey) for rank in shown)]), ranks, places)

    def _place(self, rank: int, survey: Survey) -> dict[str, Any]:
        about = survey.abouts.get(rank)
        if about is None:
            return {"gone": True}
        file, line, code = about["line"] or (None, None, None)
        kept = {key: about[key] for key in ("phase", "pid", "host")}
        where = {"file": file, "line": line, "code": code, "stacks": survey.stacks.get(rank)}
        return {**kept, **where, "gone": rank in survey.gone}

    def _line(self, rank: int, survey: Survey) -> str:
        about = survey.abouts.get(rank)
        if rank in survey.gone or about is None:
            return f"rank {rank} is gone: {self._last_seen(about)}"
        line = "{}:{}: {}".format(*about["line"]) if about["line"] else ""
        who = f"rank {rank} is missing: " if self.world_size > 1 else "it is "
        head = f"{who}{about['where']}, for {about['seconds']:.0f} s (pid {about['pid']} on {about['host']})"
        stack = "\n".join(f"  {each}" for each in survey.stacks.get(rank, "").rstrip().splitlines())
        return "\n".join(filter(None, (head, f"  {line}", stack)))

    # ---- who is missing --------------------------------------------------------------------------------------------

    def who_is_missing(self, problem: str) -> str:
        """After a collective failed: a message that names the missing ranks, and the line of code each of them is at."""
        head = f"rank {self.rank} waited for the other ranks in vain at step {self.activity.step}: {problem}"
        if not self._mailbox.is_open:
            return f"{head}\nTo fix: look at the output of the other ranks."
        survey = self._survey()
        if failed := {rank: about for rank, about in survey.abouts.items() if about["failure"] and rank != self.rank}:
            lines = [f"rank {rank} failed: {about['failure']}" for rank, about in failed.items()]
            return "\n".join([*lines, head, "To fix: fix what the first of them raised."])
        missing = [rank for rank in survey.behind if rank != self.rank]
        lines = [self._line(rank, survey) for rank in missing]
        if not lines:
            lines = [f"rank {rank} was {about['where']}" for rank, about in survey.abouts.items() if rank != self.rank]
        fix = f"find out why it is not at the same collective; if it is only slow, raise loop.rank_timeout_seconds ({self.timeout_seconds:g})"
        return "\n".join([*lines, head, f"To fix: {fix}."])

    def _survey(self, ranks: list[int] | None = None) -> Survey:
        """Ask these ranks, or all, where they are."""
        others = [rank for rank in (range(self.world_size) if ranks is None else ranks) if rank != self.rank]
        token = f"{self.rank} {time.monotonic()}"
        before = {rank: self._mailbox.about(rank) for rank in others}
        if ranks is None:
            self._mailbox.set("asked", token)
        abouts: dict[int, dict[str, Any]] = {self.rank: self._about()}
        deadline = time.monotonic() + max(ANSWER_SECONDS, 3 * self._period)
        ended = {rank for rank, about in before.items() if about is not None and self._has_ended(about)}
        waiting = set(others) - ended
        while waiting and time.monotonic() < deadline:
            self._closing.wait(self._period / 2)
            self._report()  # others may be asking, too
            for rank in sorted(waiting):
                about, earlier = self._mailbox.about(rank), before[rank]
                if about is not None and (earlier is None or about["time"] != earlier["time"]):
                    abouts[rank] = about
                    waiting.discard(rank)
            if any(about["failure"] for about in abouts.values()):
                break
        if any(about["failure"] for about in abouts.values()):
            waiting.clear()
        abouts |= {rank: about for rank in others if rank not in abouts and (about := before[rank]) is not None}
        waiting |= ended
        found = Survey(abouts, {}, sorted(waiting))
        shown = found.behind or list(abouts)
        deadline = time.monotonic() + ANSWER_SECONDS
        for rank in shown if ranks is None else ():
            found.stacks[rank] = self._stacks() if rank == self.rank else ""
            while rank not in (self.rank, *waiting) and not found.stacks[rank] and time.monotonic() < deadline:
                found.stacks[rank] = self._mailbox.get(f"stack/{token}/{rank}") or ""
                self._closing.wait(0.0 if found.stacks[rank] else self._period / 2)
        return found

    def _has_ended(self, about: dict[str, Any]) -> bool:
        return bool(about["host"] == socket.gethostname() and process_state(about["pid"]) == ENDED)

    def _last_seen(self, about: dict[str, Any] | None) -> str:
        if not self._mailbox.answers:
            return "the store in which the ranks leave their signs of life does not answer: its machine is gone, or this one is cut off"
        if about is None:
            return "it never gave a sign of life"
        state = process_state(about["pid"]) if about["host"] == socket.gethostname() else ""
        ago = time.time() - about["time"]
        seen = f"its last sign of life was {ago:.0f} s ago, {about['where']} (pid {about['pid']} on {about['host']})"
        return f"{state}; {seen}" if state else seen
