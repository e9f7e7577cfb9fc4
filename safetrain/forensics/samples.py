"""Which elements of the batch make the step bad: read off at the origin, else searched by leaving some out.

Only samples without which the step is finite are reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..core import progress
from .finding import Finding
from .replay import Replayer, Result, named_fields
from .samples_of import batch_size, samples_of_rows, select
from .update import update_is_finite
from .values import bad_positions, marked_rows

TIME_FOR_SAMPLES = 0.5
"""Share of the time of an investigation."""


@dataclasses.dataclass
class Samples:
    guilty: list[int]
    note: str = ""
    without: Result | None = None
    """The step without them."""
    failed: bool = False


def search(replayer: Replayer, finding: Finding, max_replays: int) -> Samples:
    batch = replayer.step.window[finding.trace.micro_batch]
    size = batch_size(batch)
    if size < 2:
        return Samples([], "the batch holds one sample")
    trial = _Trial(replayer, batch, size, max_replays, finding.phase == "optimizer")
    for candidate in _read_off(finding, batch, size):
        if 0 < len(candidate) < size and trial.may_go_on and trial.is_finite_without(frozenset(candidate)):
            return _with_note(trial, trial.smallest_of(candidate))
    guilty = trial.smallest_set()
    if not guilty:
        return Samples([], "no few samples are to blame: leaving some out does not make the step finite")
    if trial.any_would_do(guilty):
        return Samples([], "no sample is to blame: leaving out any others of the same number makes the step finite too")
    return _with_note(trial, guilty)


def _with_note(trial: _Trial, guilty: list[int]) -> Samples:
    without = trial.result_without(frozenset(guilty))
    others = [i for i in range(trial.size) if i not in guilty]
    halves = others[: len(others) // 2], others[len(others) // 2 :]
    # Finite without half of the others, although the guilty samples are still in: they are bad only together with some of those.
    interact = trial.may_go_on and any(trial.result_without(frozenset(half)).finite for half in halves if half)
    note = "bad only together with other samples of the batch" if interact else ""
    return Samples(sorted(guilty), note, without)


class _Trial:
    def __init__(self, replayer: Replayer, batch: Any, size: int, max_replays: int, with_update: bool = False) -> None:
        self._with_update = with_update
        self._replayer = replayer
        self._batch = batch
        self._results: dict[frozenset[int], Result] = {}
        self._left = max_replays
        self.size = size

    @property
    def may_go_on(self) -> bool:
        return self._left > 2 and self._replayer.has_time(TIME_FOR_SAMPLES)

    def result_without(self, dropped: frozenset[int]) -> Result:
        if dropped not in self._results:
            keep = [i for i in range(self.size) if i not in dropped]
            self._left -= 1
            progress.note("looking for the samples to blame, replay", len(self._results) + 1)
            result = self._replayer.plain(window=[select(self._batch, keep, self.size)])
            if self._with_update and result.finite and not update_is_finite(self._replayer):
                result.bad_gradients = ["the update"]
            self._results[dropped] = result
        return self._results[dropped]

    def is_finite_without(self, dropped: frozenset[int]) -> bool:
        if len(dropped) == self.size:
            return True
        if dropped not in self._results and not self.may_go_on:
            raise _OutOfBudget
        return self.result_without(dropped).finite

    def smallest_set(self) -> list[int]:
        """A smallest set of samples without which the step is finite, in about k log n replays (QuickXplain)."""
        try:
            guilty = self._needed(frozenset(), list(range(self.size)), False)
        except _OutOfBudget:
            return []
        if not guilty or len(guilty) > self.size // 2 or not self.result_without(frozenset(guilty)).finite:
            return []
        return guilty

    def smallest_of(self, candidate: list[int]) -> list[int]:
        """Those of a set that are needed: rows may hold an intended Inf and be innocent. All of it when that takes too long."""
        if len(candidate) == 1:
            return candidate
        try:
            needed = self._needed(frozenset(), candidate, False)
            return sorted(needed) if self.is_finite_without(frozenset(needed)) else candidate
        except _OutOfBudget:
            return candidate

    def any_would_do(self, guilty: list[int]) -> bool:
        """Is the step finite as well without as many others? Then it is their number that matters, not which they are."""
        others = [i for i in range(self.size) if i not in guilty]
        sets = [others[: len(guilty)], others[-len(guilty) :]]
        if len(others) < len(guilty) or len(guilty) < 2 or not self.may_go_on:
            return False
        return all(self.result_without(frozenset(each)).finite for each in sets)

    def _needed(self, dropped: frozenset[int], candidates: list[int], has_changed: bool) -> list[int]:
        if has_changed and self.is_finite_without(dropped):
            return []
        if len(candidates) == 1:
            return candidates
        half = len(candidates) // 2
        first, second = candidates[:half], candidates[half:]
        in_second = self._needed(dropped | set(first), second, True)
        if len(in_second) > max(2, self.size // 2):
            raise _OutOfBudget
        in_first = self._needed(dropped | set(in_second), first, bool(in_second))
        return in_first + in_second


class _OutOfBudget(Exception):
    pass


def _read_off(finding: Finding, batch: Any, size: int) -> Iterator[list[int]]:
    """Rows with bad values, at the origin or in the batch itself."""
    if finding.blame.leaf is not None and finding.blame.leaf.kind == "batch":
        tensor = dict(named_fields(batch)).get(finding.blame.leaf.name)
        mask = None if tensor is None else bad_positions(tensor)
        if mask is not None and mask.dim() and mask.shape[0] == size:
            yield marked_rows(mask)
    for event in (finding.event, finding.blame.conversion):
        facts = None if event is None else event.facts
        if facts is None:
            continue
        for rows, num_rows in [(facts.rows, facts.num_rows), *facts.operand_rows.values()]:
            if rows and (owners := samples_of_rows(batch, rows, num_rows)):
                yield owners
            elif rows and num_rows % size == 0:
                repeats = num_rows // size
                yield sorted({row // repeats for row in rows})
                if repeats > 1:
                    yield sorted({row % size for row in rows})
