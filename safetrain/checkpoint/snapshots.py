"""The training state in memory, to roll back to."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..distributed.comm import gather, num_processes
from ..tensors.checksum import checksums
from ..tensors.sharded import any_dtensor
from .copies import Copy, Frozen
from .soundness import FATAL_JUMP, jumps, peaks_of, problems_in
from .state import TrainState


@dataclass
class Snapshot:
    step: int
    """Attempted steps before it."""
    memory: Copy = field(repr=False)
    state: TrainState = field(repr=False)
    peaks: dict[str, tuple[float, float]] = field(repr=False)
    num_healthy: int = 0
    """Committed steps since, without a refusal among them."""
    trusted: bool = False
    about: dict[str, Any] | None = None
    """What a checkpoint of this state says of itself; None if it is good for a rollback only."""
    used: bool = False
    """It was rolled back to before; if the trouble returns, it is suspect."""


@dataclass(frozen=True)
class SnapshotAudit:
    problems: dict[str, str] = field(default_factory=dict)
    is_fatal: bool = False
    """No run should go on with it: a value that is not finite, a negative second moment, an implausible growth."""


class SnapshotRing:
    """The last few snapshots, and the very first one.

    A snapshot is taken only of a state that passes the audit: every value finite, no negative second moment, no tensor
    a thousand times larger than in the snapshot before. It is *trusted* after `trust_after` committed steps without a
    refusal. The newest trusted one is never overwritten before another is trusted.
    """

    def __init__(self, size: int, trust_after: int) -> None:
        self._size, self._trust_after = size, trust_after
        self.first: Snapshot | None = None
        self._ring: list[Snapshot] = []
        self._spare: list[Copy] = []
        self._frozen = Frozen()
        self._arriving: Snapshot | None = None
        """The newest one, while it is being copied."""
        self.num_taken = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def num_bytes(self) -> int:
        """Memory that is held now."""
        held = [snapshot.memory for snapshot in (self.first, *self._ring) if snapshot is not None]
        return sum(copy.num_bytes for copy in (*held, *self._spare)) + self._frozen.num_bytes

    def take(
        self,
        step: int,
        state: TrainState,
        allow_growth: bool = False,
        agree: Callable[[SnapshotAudit], SnapshotAudit] = lambda audit: audit,
        about: dict[str, Any] | None = None,
        at_once: Collection[str] = (),
    ) -> SnapshotAudit:
        """Copy the state, unless the audit finds something wrong with it: then nothing is kept. `allow_growth`: a tensor that
        grew is accepted, because it was already that large the last time. `agree`: what the audits of all processes say. `at_once`:
        tensors that may be written before `order` is called, which comes before all others are."""
        begin = time.perf_counter()
        try:
            peaks = peaks_of(state.tensors)
            before = self._ring[-1] if self._ring else self.first
            peaks_before = None if before is None else before.peaks
            broken = problems_in(peaks, state.rest["born_bad"])
            if grown := jumps(peaks, peaks_before, state.rest["buffers"]):
                broken |= jumps(peaks, peaks_before, state.rest["buffers"], FATAL_JUMP)
                grown = {} if allow_growth else grown
            audit = agree(SnapshotAudit(broken or grown, is_fatal=bool(broken)))
            if audit.problems:
                return audit
            self.order()
            kept = self.kept(state)
            memory = Copy() if self.first is None else self._free_memory()
            copied = memory.take(state, kept, None if self.first is None else at_once)
            snapshot = Snapshot(step, memory, copied, peaks, trusted=self._trust_after == 0, about=about)
            if self.first is None:
                self.first = snapshot
            else:
                self._ring.append(snapshot)
                self._arriving = snapshot
            self.num_taken += 1
            return audit
        finally:
            self.seconds += time.perf_counter() - begin

    def kept(self, state: TrainState) -> dict[str, Tensor]:
        """Its weights that are not trained, of which one copy is enough."""
        return self._frozen.values_of(state.tensors, state.rest.get("frozen", ()))

    def order(self) -> None:
        """Call it before the state is written again: the device finishes the newest copy first. The host waits for nothing."""
        snapshot, self._arriving = self._arriving, None
        if snapshot is not None and not snapshot.memory.order() and snapshot in self._ring:
            self._ring.remove(snapshot)  # something else has written the state, so it is of no one moment
            self._spare.append(snapshot.memory)

    def _free_memory(self) -> Copy:
        if self._spare:
            return self._spare.pop()
        if len(self._ring) < self._size:
            return Copy()
        newest_trusted = next((s for s in reversed(self._ring) if s.trusted), None)
        oldest = next((s for s in self._ring if s is not newest_trusted), self._ring[0])
        self._ring.remove(oldest)
        return oldest.memory

    def newest_trusted(self) -> Snapshot | None:
        """Or the very first one. Of those that are in the host's memory already: the device need not work any more."""
        return next((s for s in reversed(self._ring) if s.trusted and s.memory.is_here), self.first)

    def committed(self, num_steps: int = 1) -> None:
        """Count `num_steps` more committed steps since the snapshots were taken."""
        for snapshot in (*self._ring, self.first):
            if snapshot is not None and not snapshot.trusted:
                snapshot.num_healthy += num_steps
                if snapshot.num_healthy > 1 and snapshot is not self._arriving:
                    snapshot.memory.arrived()
                snapshot.trusted = snapshot.num_healthy >= self._trust_after

    def refused(self) -> None:
        """A step was refused: snapshots that are not trusted yet start to count again."""
        for snapshot in (*self._ring, self.first):
            if snapshot is not None and not snapshot.trusted:
                snapshot.num_healthy = 0

    def forget(self) -> None:
        """All snapshots, the first one included."""
        self._spare += [snapshot.memory for snapshot in self._ring]
        self.first, self._ring = None, []

    def peek(self, restart: bool = False, before: int | None = None) -> Snapshot | None:
        """The snapshot that `pick` would choose; nothing is forgotten. `before`: of a state before this step."""
        self.order()
        ring = [s for s in self._ring if before is None or s.step <= before]
        chosen = None if restart else next((s for s in reversed(ring) if s.trusted and not s.used), None)
        chosen = chosen or self.first
        if chosen is not None:
            chosen.memory.finish()
        return chosen

    def distrust(self, since: int) -> None:
        """Snapshots of later states are not rolled back to."""
        for snapshot in self._ring:
            snapshot.used |= snapshot.step > since

    def pick(self, restart: bool = False) -> Snapshot | None:
        """The snapshot to roll back to, and forget all newer ones: they led to the trouble.

        The newest trusted one; an older one if that was rolled back to before, or is not the same on all ranks; the very first one
        if none is left, or with `restart`. None if nothing was ever taken. All ranks must call it.
        """
        chosen = self.peek(restart)
        while chosen is not None and not is_common(chosen.state):
            chosen.used = True
            chosen = None if chosen is self.first else self.peek(restart)
        kept = [] if chosen in (None, self.first) else self._ring[: self._ring.index(chosen) + 1]
        self._spare += [s.memory for s in self._ring[len(kept) :]]
        self._ring = kept
        if chosen is not None:
            chosen.used = True
        return chosen

    @property
    def is_used_up(self) -> bool:
        """There are snapshots to go back to, and the run went back to each of them already."""
        trusted = [s for s in self._ring if s.trusted]
        return self.first is not None and self.first.used and all(s.used for s in trusted)

    def all(self) -> list[Snapshot]:
        """The first one, and the others, oldest first."""
        return [*([] if self.first is None else [self.first]), *self._ring]

    def put_back(self, snapshots: list[Snapshot]) -> None:
        """The ring of an earlier process, but for the first one; without the oldest if it is smaller now."""
        self._ring = snapshots[-self._size :]

    def forget_after(self, step: int) -> None:
        """The run went back to a state of that step by other means: newer snapshots led to the trouble."""
        self._spare += [s.memory for s in self._ring if s.step > step]
        self._ring = [s for s in self._ring if s.step <= step]
        if self.first is not None and self.first.step > step:
            self._spare.append(self.first.memory)
            self.first = None


def is_common(state: TrainState) -> bool:
    """Whether the ranks, if each has the whole model, have the same weights and optimizer state in it. All of them must call it."""
    if num_processes() == 1 or any_dtensor(state.tensors.values()):
        return True
    own = state.rest["buffers"]  # of the forward passes of a rank
    parts = ("model/", "extra/", "optimizer/", "ema/")
    numbers = checksums([t for name, t in state.tensors.items() if name.startswith(parts) and name not in own])
    return len(set(map(tuple, gather(numbers)))) == 1


def agreed(audit: SnapshotAudit) -> SnapshotAudit:
    """What is wrong with the state of one process is wrong with the state of the run."""
    audits = gather(audit)
    problems = {name: problem for each in audits for name, problem in each.problems.items()}
    return SnapshotAudit(problems, is_fatal=any(each.is_fatal for each in audits))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without Python's garbage collector: with thousands of tensors it would start several times, and go through every object of
    the process, which takes longer than the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
