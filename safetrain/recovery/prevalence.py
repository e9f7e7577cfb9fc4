"""Detects when bad steps are the rule, and what the bad samples have in common: such a run is stopped instead of
repaired again and again."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config.schema import RecoveryConfig
from ..core.numbers import amount
from ..tensors.nest import named_tensors, num_samples
from .refused_step import RefusedStep

SPAN = 100
"""Steps that are looked back at."""
FEWEST = 20
"""Bad steps that are no accident, however few steps there were."""
FIRST = 8
"""Steps at the start of a run: when all of them are bad, nothing else will come."""
FIRST_WHOLE = 3
"""The same, when every sample of each is bad: there is nothing to train on."""
BAD_DATA = "bad_input_data"
AHEAD = 16
"""Batches of the data that are looked at when the first step is bad because of its data, or a label is out of range."""
FEWEST_AHEAD = 5
"""Samples among them that share what is bad and are no accident."""
MANY = 0.5
"""Share of the steps that may be bad, where it is not known which samples are at fault."""


@dataclass
class _Field:
    """What is known of one value per sample: of the bad ones, and of the others in their batches."""

    bad: Counter[Any] = field(default_factory=Counter)
    good: set[Any] = field(default_factory=set)


class Prevalence:
    """Counts bad steps and samples of the last `SPAN` steps. Saved with the run, never rewound."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._limit = config.max_bad_share
        self._recent: deque[tuple[int, int, int]] = deque()
        """Of each bad step: its index, bad samples, all samples."""
        self._num_in_a_row = 0
        """Bad steps from the very first one on."""
        self._fields: dict[str, _Field] = {}
        self._has_looked = False
        self.advice: str | None = None
        """What to do about the data, once that is known."""

    def note(self, case: RefusedStep, ahead: Callable[[int], Iterable[Any]] = lambda count: ()) -> str | None:
        """Count a refused step. Returns why the run should end, if bad steps have become the rule. `ahead`: reads so many batches of the
        data without consuming them."""
        if self._limit is None or not case.is_step or case.is_late or not _is_bad_in_itself(case):
            return None
        step, guilty = case.view.step, case.guilty_samples
        num_bad, size = sum(map(len, guilty.values())), sum(num_samples(batch) for batch in case.window)
        is_whole = case.incident.cause.label == BAD_DATA and (num_bad == 0 or 2 * num_bad > size)
        if is_whole and num_bad == 0:  # no sample is blamed when all of them are bad
            guilty = {index: list(range(num_samples(batch))) for index, batch in enumerate(case.window)}
            num_bad = size
        self._recent.append((step, 0 if is_whole else num_bad, size))
        while self._recent and self._recent[0][0] <= step - SPAN:
            self._recent.popleft()
        if step == self._num_in_a_row:
            self._num_in_a_row += 1
        self._learn(case, guilty)
        return self._rule_of_the_data(case, is_whole, ahead) or self._too_many(step, size, is_whole)

    def _rule_of_the_data(self, case: RefusedStep, is_whole: bool, ahead: Callable[[int], Iterable[Any]]) -> str | None:
        """What is bad about this step's data is so in much of the rest, too: one incident is enough to say it."""
        if (
            self._has_looked
            or case.incident.cause.label != BAD_DATA
            or (shared := self._shared(case.view.error)) is None
        ):
            return None
        kind, path, known = shared
        if kind == NOT_FINITE and case.view.step > 0:  # nothing unusual about a few
            return None
        self._has_looked = True
        lowest, highest = min(known.bad), max(known.bad)
        is_below = kind == INTEGER and highest < 0
        # When all samples were bad, no other shows where it begins: as far below as they are apart.
        least = lowest if known.good or kind == NOT_FINITE else 2 * lowest - highest
        num_bad = num_seen = 0
        for values in [
            v for batch in ahead(AHEAD) for p, k, v in _per_sample(batch, num_samples(batch)) if (p, k) == (path, kind)
        ]:
            for value in values:
                is_bad = value <= highest if is_below else value >= least
                num_bad, num_seen = num_bad + is_bad, num_seen + 1
                (known.bad.update if is_bad else known.good.add)([value] if is_bad else value)
        assert self._limit is not None
        begins_at_one = (
            kind == INTEGER and len(known.bad) == 1 and min(known.good, default=0) == 1 == lowest - max(known.good)
        )
        is_rule = num_bad >= FEWEST_AHEAD and num_bad > (MANY if is_whole else self._limit) * num_seen
        if not is_rule and not (begins_at_one and num_seen >= 5 * lowest):
            return None
        if kind == NOT_FINITE:
            self.advice = f"repair field {path!r} where it is read or computed"
        elif begins_at_one:
            self.advice = f"subtract 1 from field {path!r}: classes are counted from 0, and these go from 1 to {lowest}"
        elif is_below:
            self.advice = (
                f"give the loss ignore_index={lowest} if these samples have no label, or leave them out of the data"
            )
        else:
            self.advice = (
                f"give field {path!r} values from 0 to one less than the model has scores, or the model more of them"
            )
        return self._said(f"{num_bad} of {num_seen} samples of the data are like this")

    def _shared(self, error: BaseException | None) -> tuple[str, str, _Field] | None:
        """The field by which the bad samples differ: by values that are not finite, or that are larger or smaller than all others
        and named by the error (`Target 10 is out of bounds`)."""
        named = set(map(int, re.findall(r"-?\d+", str(error or ""))))
        for key, known in sorted(self._fields.items(), key=lambda item: item[0][:1] != NOT_FINITE):
            kind, path = key[:1], key[1:]
            if kind == NOT_FINITE and set(known.bad) == {True} and True not in known.good:
                return kind, path, known
            if (
                kind == INTEGER
                and named & set(known.bad)
                and (not known.good or min(known.bad) > max(known.good) or max(known.bad) < min(0, *known.good))
            ):
                return kind, path, known
        return None

    def _too_many(self, step: int, size: int, is_whole: bool) -> str | None:
        num_steps, num_bad = min(step + 1, SPAN), len(self._recent)
        from_the_start = self._num_in_a_row == step + 1
        if from_the_start and num_bad >= (FIRST_WHOLE if is_whole else FIRST):
            return self._said(f"all of the first {num_bad} steps were bad")
        if num_bad < FEWEST:
            return None
        samples = sum(bad for _, bad, _ in self._recent)
        known = all(bad for _, bad, _ in self._recent)
        share = samples / (size * num_steps) if known else num_bad / SPAN
        assert self._limit is not None
        if share <= (self._limit if known else MANY):
            return None
        of = f"{share:.0%} of the samples" if known else f"{share:.0%} of the steps"
        return self._said(f"{num_bad} of the last {num_steps} steps were bad, {of} (recovery.max_bad_share)")

    def _said(self, what: str) -> str:
        pattern = self.pattern()
        tail = f": {pattern}" if pattern else ""
        return f"recovery: {what}{tail}; repairing them one by one would hide a mistake in the data or the model"

    # ---- what they have in common ------------------------------------------------------------------------------

    def _learn(self, case: RefusedStep, guilty: Mapping[int, list[int]]) -> None:
        for index, batch in enumerate(case.window):
            bad = set(guilty.get(index, ()))
            for path, kind, values in _per_sample(batch, num_samples(batch)):
                known = self._fields.setdefault(f"{kind}{path}", _Field())
                for row, value in enumerate(values):
                    if row in bad:
                        known.bad[value] += 1
                    elif len(known.good) < 10_000:
                        known.good.add(value)

    def pattern(self) -> str | None:
        """What all bad samples share and no other sample has, in words."""
        for key, known in sorted(self._fields.items(), key=lambda item: item[0][:1] != NOT_FINITE):
            kind, path = key[:1], key[1:] or "batch"
            total = sum(known.bad.values())
            if not total:
                continue
            if kind == NOT_FINITE:
                if set(known.bad) == {True} and True not in known.good:
                    return f"every sample with NaN or Inf in field {path!r}"
                continue
            if not known.good:
                values = sorted(known.bad)
                if len(values) < total:
                    return f"every sample; field {path!r} goes from {amount(values[0])} to {amount(values[-1])}"
                continue
            only = [value for value in known.bad if value not in known.good]
            if sum(known.bad[value] for value in only) < 0.99 * total or len(only) > max(8, len(known.good)):
                continue
            if min(only) > max(known.good):
                others = f"the others go from {amount(min(known.good))} to {amount(max(known.good))}"
                return f"every sample whose field {path!r} is {_amounts(only)}; {others}"
            return f"every sample whose field {path!r} is {_amounts(only)}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [list(each) for each in self._recent], "in_a_row": self._num_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent = deque((a, b, c) for a, b, c in state["recent"])
        self._num_in_a_row = state["in_a_row"]


NOT_FINITE, INTEGER = "!", "="


def _per_sample(batch: Any, size: int) -> Iterator[tuple[str, str, list[Any]]]:
    """One value for each sample: of integer fields with one number per sample, and whether a field has one that is not finite."""
    for path, tensor in named_tensors(batch):
        if (
            not isinstance(tensor, Tensor)
            or tensor.dim() == 0
            or tensor.shape[0] != size
            or tensor.layout != torch.strided
        ):
            continue
        if tensor.is_floating_point():
            yield path, NOT_FINITE, (~torch.isfinite(tensor.detach())).reshape(size, -1).any(1).tolist()
        elif not tensor.is_complex() and math.prod(tensor.shape[1:]) == 1:
            yield path, INTEGER, tensor.reshape(size).tolist()


def _is_bad_in_itself(case: RefusedStep) -> bool:
    return case.is_non_finite or (case.view.error is not None and not case.has_bad_state)


def _amounts(values: list[Any]) -> str:
    ordered = sorted(values)
    return ", ".join(map(str, ordered[:8])) + (", …" if len(ordered) > 8 else "")
