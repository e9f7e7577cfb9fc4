"""What ranks report to each other in every step, and how it is decided on: plain numbers in, the same decision on
every rank.

The numbers of a step travel as one vector of equal length on every rank:

    status of this rank | seconds it spent on data, and on the rest before backward | for each known name: how many values, and their sum

A name that is not there on some rank (a metric that only rank 0 returns) counts zero values there. A name that was never
seen before is sent as an object, once; from then on it has its place in the vector.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.verdict import Action, Decision, Verdict, merge


class RankState(enum.IntEnum):
    """Where a rank is in the step."""

    STEP = 0
    """Has run its forward passes."""
    END = 1
    """Has no more data in this epoch."""
    FAILED = 2
    """Raised because of its numbers: a refused step."""
    FATAL = 3
    """Raised something that ends the run."""


@dataclass(frozen=True)
class RankStatus:
    """The first numbers of a rank's vector."""

    state: RankState
    signal: int = 0
    out_of_time: bool = False
    trail: int = 0
    """A checksum of everything decided so far; equal on all ranks as long as they decide alike."""
    last_norm: float = 0.0
    """The gradient norm of its last step, which was reduced over all ranks."""
    has_late_signals: bool = False
    """Some of its numbers are known after backward only, and are exchanged then."""
    num_unknown: int = 0
    """Names that have no place in the vector yet."""
    is_stopping: bool = False
    """The run is to end in the ordinary way after this step."""

    LENGTH = 8

    def pack(self) -> list[float]:
        numbers = (self.state, self.signal, self.out_of_time, self.trail, self.last_norm, self.has_late_signals)
        return [*map(float, numbers), float(self.num_unknown), float(self.is_stopping)]

    @classmethod
    def unpack(cls, numbers: Sequence[float]) -> RankStatus:
        state, signal, out_of_time, trail, norm, later, unknown, stopping = numbers
        flags = bool(out_of_time), int(trail), norm, bool(later), int(unknown), bool(stopping)
        return cls(RankState(int(state)), int(signal), *flags)


Array = NDArray[Any]
HEAD = RankStatus.LENGTH + 2
"""Numbers before those of the names."""


Values = Mapping[str, Sequence[Tensor | float]]
"""Several of one name: a metric that every micro-batch returned."""


@dataclass
class Tally:
    """The values of one name on one rank."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.count


Row = dict[str, Tally]


class Layout:
    """The names that have a place in the vector. It only grows, on all ranks at once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def num_unknown(self, values: Values) -> int:
        return len(values.keys() - set(self.names))

    def extend(self, names: Iterable[str]) -> None:
        known = set(self.names)
        self.names += [name for name in dict.fromkeys(names) if name not in known]

    def pack(
        self, status: RankStatus, values: Values, device: torch.device, seconds: tuple[float, float] = (0.0, 0.0)
    ) -> Tensor:
        """Stays on the device."""
        counts = [float(len(values.get(name, ()))) for name in self.names]
        totals = [_total(values.get(name, ())) for name in self.names]
        wide = torch.float64
        if device.type == "cpu":
            return torch.tensor([*status.pack(), *seconds, *counts, *map(float, totals)], dtype=wide)
        known = torch.tensor([*status.pack(), *seconds, *counts], dtype=wide).to(device, non_blocking=True)
        if not totals:
            return known
        return torch.cat([known, torch.stack([torch.as_tensor(t).to(device, wide).reshape(()) for t in totals])])

    def unpack(self, numbers: Array) -> RankReports:
        """`numbers`: a row for each rank."""
        width = len(self.names)
        counts, totals = numbers[:, HEAD : HEAD + width], numbers[:, HEAD + width : HEAD + 2 * width]
        statuses = numbers[:, : RankStatus.LENGTH]
        # With many ranks nothing may be done for each of them in Python, in a step that goes as usual.
        are_alike = bool(np.array_equal(statuses, np.broadcast_to(statuses[0], statuses.shape), equal_nan=True))
        each = [RankStatus.unpack(row.tolist()) for row in (statuses[:1] if are_alike else statuses)]
        return RankReports(
            each * len(numbers) if are_alike else each, Rows(list(self.names), counts, totals), are_alike
        )


class Rows(Sequence[Row]):
    """The values of every rank. A row is made when it is asked for."""

    def __init__(self, names: list[str], counts: Array, totals: Array) -> None:
        self.names, self._counts, self._totals = names, counts, totals

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        found = zip(self.names, self._counts[index].tolist(), self._totals[index].tolist(), strict=True)
        return {name: Tally(int(count), total) for name, count, total in found if count}

    @cached_property
    def _sums(self) -> dict[str, tuple[float, float]]:
        pairs = zip(self._counts.sum(0).tolist(), self._totals.sum(0).tolist(), strict=True)
        return {name: (count, total) for name, (count, total) in zip(self.names, pairs, strict=True) if count}

    def given(self) -> Iterable[str]:
        """The names that some rank has values of."""
        return self._sums

    def mean(self, name: str) -> float:
        count, total = self._sums[name]
        return total / count

    def largest(self, name: str) -> float:
        index = self.names.index(name)
        counts = self._counts[:, index]
        return float((self._totals[counts > 0, index] / counts[counts > 0]).max())


def tallied(values: Values) -> Row:
    """On the host."""
    return {name: Tally(len(each), float(_total(each))) for name, each in values.items()}


def _total(values: Sequence[Tensor | float]) -> Tensor | float:
    detached = [value.detach() if isinstance(value, Tensor) else float(value) for value in values]
    return sum(detached[1:], start=detached[0]) if detached else 0.0


def names_in(rows: Sequence[Row]) -> Iterable[str]:
    return rows.given() if isinstance(rows, Rows) else dict.fromkeys(name for row in rows for name in row)


def mean_over(rows: Sequence[Row], name: str) -> float:
    """NaN and Inf of any rank show."""
    if isinstance(rows, Rows):
        return rows.mean(name)
    there = [row[name] for row in rows if name in row]
    return sum(tally.total for tally in there) / sum(tally.count for tally in there)


def largest_over(rows: Sequence[Row], name: str) -> float:
    """NaN, if it is NaN on any rank."""
    if isinstance(rows, Rows):
        return rows.largest(name)
    values = [row[name].mean for row in rows if name in row]
    return math.nan if any(map(math.isnan, values)) else max(values)


@dataclass(frozen=True)
class RankReports:
    """Everything that the ranks reported about a step. Equal on every rank."""

    statuses: Sequence[RankStatus]
    rows: Sequence[Row] = ()
    are_alike: bool = False
    """Every rank has reported the status that rank 0 has."""

    def in_state(self, *states: RankState) -> list[int]:
        if self.are_alike:
            return list(range(len(self.statuses))) if self.statuses[0].state in states else []
        return [rank for rank, status in enumerate(self.statuses) if status.state in states]

    @property
    def signal(self) -> int | None:
        statuses = self.statuses[:1] if self.are_alike else self.statuses
        return next((status.signal for status in statuses if status.signal), None)

    @property
    def out_of_time(self) -> bool:
        return any(status.out_of_time for status in (self.statuses[:1] if self.are_alike else self.statuses))

    @property
    def have_late_signals(self) -> bool:
        return any(status.has_late_signals for status in (self.statuses[:1] if self.are_alike else self.statuses))

    @property
    def have_unknown(self) -> bool:
        return any(status.num_unknown for status in (self.statuses[:1] if self.are_alike else self.statuses))

    @property
    def is_stopping(self) -> bool:
        return any(status.is_stopping for status in self.statuses)

    @property
    def diverged(self) -> list[int]:
        """Ranks whose record of the run so far is not that of rank 0."""
        first = self.statuses[0]
        if self.are_alike:
            return []
        return [
            r for r, w in enumerate(self.statuses) if w.trail != first.trail or not _alike(w.last_norm, first.last_norm)
        ]

    @property
    def losses(self) -> list[float]:
        """The mean loss of each rank's window; NaN for a rank that has none."""
        means = []
        for row in self.rows:
            found = [tally for name, tally in row.items() if name.startswith("loss/")]
            means.append(sum(t.mean for t in found) / len(found) if found else math.nan)
        return means

    @property
    def suspects(self) -> list[int]:
        """All ranks, the likeliest to be at fault first: who raised, who has numbers that are not finite, the larger loss."""

        def suspicion(rank: int) -> tuple[bool, int, float, int]:
            failed = self.statuses[rank].state >= RankState.FAILED
            row = self.rows[rank] if self.rows else {}
            num_bad = sum(not math.isfinite(tally.total) for tally in row.values())
            loss = self.losses[rank] if self.rows else 0.0
            return not failed, -num_bad, -loss if math.isfinite(loss) else 0.0, rank

        return sorted(range(len(self.statuses)), key=suspicion)


def _alike(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or one == other or abs(one - other) <= 1e-6 * abs(other)


@dataclass(frozen=True)
class RankDecision:
    """A rank's own decision about a refused step, for the others."""

    decision: Decision
    is_bystander: bool = False
    """It raised only because another rank did, so its guards' verdicts on the step mean nothing."""
    late_error: str | None = None
    """Its backward raised after it had reported a finished forward."""


def merged(decisions: Sequence[RankDecision], suspects: Sequence[int]) -> Decision:
    """One decision for all: every guard's most severe verdict over the ranks, in the words of the likeliest culprit."""
    verdicts: dict[str, Verdict] = {}
    for rank in suspects:
        if decisions[rank].is_bystander:
            continue
        for guard, verdict in decisions[rank].decision.verdicts.items():
            if guard not in verdicts or _outweighs(verdict, verdicts[guard]):
                verdicts[guard] = _of_rank(verdict, rank)
    for rank in suspects:
        if (text := decisions[rank].late_error) is not None:
            evidence = {"signal": "exception", "value": math.nan, "rank": rank}
            verdicts["loop"] = Verdict(Action.SKIP, reason=f"on rank {rank}, {text}", evidence=evidence)
            break
    return merge(verdicts.items())


def _outweighs(verdict: Verdict, other: Verdict) -> bool:
    """More severe; or as severe, and it names samples where the other does not."""
    if verdict.action is not other.action:
        return verdict.action > other.action
    return bool(verdict.bad_samples) and not other.bad_samples


def _of_rank(verdict: Verdict, rank: int) -> Verdict:
    if verdict.action is Action.COMMIT:
        return verdict
    return replace(verdict, evidence={**verdict.evidence, "rank": rank})


@dataclass
class LocalBlame:
    """What a refused step means for this rank's own window."""

    guilty: dict[int, list[int]] = field(default_factory=dict)
    """Its guilty samples, by micro-batch."""
    droppable: dict[int, list[int]] = field(default_factory=dict)
    """Those that a replay has shown to be guilty, and that may be left out."""
    all_can_drop: bool = False
    """Some rank has such samples, and every guilty rank's step can do without its own."""
