"""Whether the weights change as they should: in every applied step, at no other time, and equally on all ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.comm import gather, num_processes
from ..tensors.devices import sent
from .fingerprint import Sample, as_signal, digests
from .graph import Chains, patterns

_VERSION = operator.attrgetter("_version")
STRONG = 1e-3
"""A gradient of this share of the global norm is no rounding error."""
LOOKS = 3
"""Looks in a row with a gradient of exactly 0, after which it is not by chance."""


@dataclass
class Applied:
    """All weights before and after an applied step."""

    step: int
    before: Tensor
    after: Tensor
    versions: list[int]
    strong: Tensor | None


@dataclass(frozen=True)
class Differing:
    """Weights that are not the same on all ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those at fault; none if that is not known."""
    sound_rank: int | None
    """The first of the others."""


class WeightLooks:
    """Everything stays on the device, in one number for each tensor."""

    def __init__(self, weights: Mapping[str, Tensor], is_whole: bool, always: Chains = frozenset()) -> None:
        """`is_whole`: the model is not sharded over the processes. `always`: see `patterns`."""
        self._always = always
        self.names, self.tensors = list(weights), list(weights.values())
        self._is_whole, self.compares_ranks = is_whole, is_whole and num_processes() > 1
        self._sample = Sample(self.tensors)
        self._before: tuple[int, Tensor, Tensor | None] | None = None
        self._applied: Applied | None = None
        self._stuck: Tensor | None = None
        self._zero: Tensor | None = None
        """How many looks in a row have found a gradient of exactly 0."""
        self._changed: Tensor | None = None
        self._written = torch.zeros(len(self.tensors), dtype=torch.bool)
        """Weights that the program itself writes to between steps without torch noticing."""
        self._suspects: set[int] = set()
        """Ranks on which weights have changed by themselves."""

    def is_between(self, step: int) -> bool:
        """The step before was looked at, and what it led to is to be compared."""
        return self._applied is not None and self._applied.step == step - 1

    def measure(self, step: int, is_look: bool, norm: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if (sampled := self._sample.take()) is not None:
            found |= self._for_ranks("weights", sampled)
        if is_look or self.is_between(step):
            now = digests(self.tensors)
            if self._applied is not None and self.is_between(step):
                found |= self._compare(self._applied, now)
            if is_look:
                self._before = step, now, self._strong(norm, found)
                found |= self._for_ranks("all_weights", as_signal(now.sum())) if self.compares_ranks else {}
        return {name: sent(value, norm.device) for name, value in found.items()}

    def _for_ranks(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """The largest over all ranks, and the smallest as the largest of the negative."""
        return {name: value, f"{name}_negative": -value} if self.compares_ranks else {name: value}

    def applied(self, step: int) -> None:
        """After the update of a step whose weights were looked at."""
        if self._before is not None and self._before[0] == step:
            after, versions = digests(self.tensors), list(map(_VERSION, self.tensors))
            self._applied = Applied(step, self._before[1], after, versions, self._before[2])
            self._before = None

    def _compare(self, applied: Applied, now: Tensor) -> dict[str, Tensor]:
        same = applied.before == applied.after
        untouched = [a == b for a, b in zip(map(_VERSION, self.tensors), applied.versions, strict=True)]
        changed = (now != applied.after) & sent(torch.tensor(untouched), now.device)
        self._changed = changed & ~sent(self._written, now.device)
        found = {"unchanged": same.float().mean(), "corrupt": self._changed.sum().float()}
        if applied.step < 2:  # what is written from the start is written on purpose
            self._written = sent(self._written, now.device) | changed
            found["corrupt"] = torch.zeros_like(found["corrupt"])
        if applied.strong is not None:
            stuck = same & applied.strong
            self._stuck, before = stuck, self._stuck
            found["stuck"] = torch.zeros(()) if before is None else (stuck & before.to(stuck.device)).sum().float()
        return found

    def _strong(self, norm: Tensor, found: dict[str, Tensor]) -> Tensor | None:
        """Which weights get a gradient that is no rounding error; None before the backward pass. Adds the share of the gradient of the
        last layers that arrives at the first ones."""
        if not self._is_whole or all(tensor.grad is None for tensor in self.tensors):
            return None
        none = norm.new_zeros(())
        norms = [none if t.grad is None or t.grad.is_sparse else torch.linalg.vector_norm(t.grad) for t in self.tensors]
        each = torch.stack([value.to(norm.device, norm.dtype) for value in norms])
        places = [index for index, tensor in enumerate(self.tensors) if tensor.dim() > 1]
        if (third := len(places) // 3) >= 2:
            sizes = torch.tensor([self.tensors[place].numel() for place in places], dtype=each.dtype).sqrt()
            typical = torch.stack([each[place] for place in places]) / sent(sizes, each.device)
            first, last = typical[:third].mean(), typical[-third:].mean()
            # NaN where no gradient arrives at all, which is not below any limit.
            found["arriving"] = first / last  # safetrain: ignore[ST201]
        matrices = sent(torch.tensor([t.dim() > 1 for t in self.tensors]), norm.device)
        known = sent(torch.tensor([t.grad is not None and not t.grad.is_sparse for t in self.tensors]), norm.device)
        zero = (each == 0) & matrices & known
        self._zero = zero.long() if self._zero is None else (self._zero.to(zero.device) + 1) * zero
        found["zeros"] = (self._zero >= LOOKS).sum().float()
        found["moving"] = (matrices & ~zero).sum().float()
        return (each > STRONG * norm) & matrices

    # ---- for a finding: these read from the device ----------------------------------------------------------------

    def stuck(self) -> tuple[str, ...]:
        return self._named(self._stuck)

    def corrupt(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Which weights changed by themselves, and on which ranks, if there are several. Collective: every rank must call it."""
        found = gather(self._named(self._changed))
        ranks = tuple(rank for rank, names in enumerate(found) if names)
        self._suspects.update(ranks)
        return tuple(dict.fromkeys(name for names in found for name in names)), ranks if len(found) > 1 else ()

    def without_gradient(self) -> tuple[str, ...]:
        """Matrices whose gradient is exactly 0, look after look; without those of lists whose other entries get one."""
        zero = self._named(None if self._zero is None else self._zero >= LOOKS)
        others = {pattern for name in self.names if name not in zero for pattern in patterns(name, self._always)}
        return tuple(name for name in zero if others.isdisjoint(patterns(name, self._always)))

    @property
    def num_matrices(self) -> int:
        return sum(tensor.dim() > 1 for tensor in self.tensors)

    def are_where_they_were(self) -> bool:
        if self._sample.is_current(self.tensors):
            return True
        self._sample = Sample(self.tensors)
        return False

    def differing(self) -> Differing:
        """Collective: every rank must call it."""
        rows = gather(digests(self.tensors).tolist())
        columns = zip(self.names, zip(*rows, strict=True), strict=True)
        names = tuple(name for name, column in columns if len(set(column)) > 1)
        alike = [sum(row == other for other in rows) for row in rows]
        if 2 * max(alike) > len(rows):
            sound = [rank for rank, count in enumerate(alike) if count == max(alike)]
        else:  # a tie: those whose weights were not seen to change by themselves, if they agree
            sound = [rank for rank in range(len(rows)) if rank not in self._suspects] if self._suspects else []
            sound = sound if len({tuple(rows[rank]) for rank in sound}) == 1 else []
        ranks = tuple(rank for rank in range(len(rows)) if rank not in sound) if sound else ()
        return Differing(names, ranks, sound[0] if sound else None)

    def _named(self, mask: Tensor | None) -> tuple[str, ...]:
        flags: Sequence[bool] = [] if mask is None else mask.tolist()
        return tuple(name for name, flag in zip(self.names, flags, strict=False) if flag)
