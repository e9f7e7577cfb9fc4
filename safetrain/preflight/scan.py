"""Statistics of every field of the data, over the batches that were read."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.numbers import listed
from ..tensors.nest import named_tensors
from .sample import CannotRead, Read, Sample

KEPT = 64
"""Names of samples kept per kind of problem."""
NUM_EXTREMES = 2


@dataclass
class Rows:
    """Samples with the same problem: how many there are, and the names of the first ones."""

    count: int = 0
    names: list[str] = field(default_factory=list)
    batches: dict[str, tuple[Read, int]] = field(default_factory=dict)
    """The batch and row of the first few, by name."""

    def add(self, read: Read, which: Tensor) -> None:
        rows = which.nonzero().flatten().tolist()
        self.count += len(rows)
        for row in rows[: KEPT - len(self.names)]:
            name = read.name(row)
            self.names.append(name)
            if len(self.batches) < 4:
                self.batches[name] = (read, row)

    @property
    def spoken(self) -> str:
        return f"sample{'s' if self.count > 1 else ''} {listed(self.names)}"


@dataclass
class Field:
    """One tensor of the batches, by its path."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of one sample, as in the first batch."""
    num_rows: int = 0
    nan: Rows = field(default_factory=Rows)
    inf: Rows = field(default_factory=Rows)
    empty: Rows = field(default_factory=Rows)
    """Samples without any value."""
    all_same: dict[int, Rows] = field(default_factory=dict)
    """By value: integer sequences that consist of nothing else."""
    all_zero: Rows = field(default_factory=Rows)
    interior: dict[int, Rows] = field(default_factory=dict)
    """By marker (padding, ignore index): sequences in which it stands between other values."""
    with_marker: dict[int, Rows] = field(default_factory=dict)
    low: Tensor | None = None
    high: Tensor | None = None
    """Smallest and largest finite value of every feature."""
    minimum: tuple[float, str] = (math.inf, "")
    maximum: tuple[float, str] = (-math.inf, "")
    """The extreme finite values, with the sample that holds them."""
    negatives: dict[int, str] = field(default_factory=dict)
    """The distinct negative values of an integer field, each with a sample that holds it."""
    peaks: list[float] = field(default_factory=list)
    """Largest absolute value of each sample."""
    extremes: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By statistic of a sample (mean, min, …): its most extreme values with the position of their batch, largest first."""


@dataclass
class Scan:
    fields: dict[str, Field] = field(default_factory=dict)
    num_rows: int = 0
    num_batches: int = 0
    num_samples: int | None = None
    """In the whole data set, if known."""
    is_whole: bool = False
    empty_batches: list[int] = field(default_factory=list)
    error: CannotRead | None = None

    @property
    def unusual(self) -> list[int]:
        """Positions of the batches with the most extreme samples: those most likely to give a non-finite step."""
        ranked = [extremes for known in self.fields.values() for extremes in known.extremes.values()]
        by_rank = [extremes[rank][1] for rank in range(NUM_EXTREMES) for extremes in ranked if rank < len(extremes)]
        return list(dict.fromkeys(by_rank))

    @property
    def seen(self) -> str:
        if self.is_whole:
            return f"all {self.num_rows} samples"
        return (
            f"{self.num_rows} samples" if self.num_samples is None else f"{self.num_rows} of {self.num_samples} samples"
        )


@torch.no_grad()
def scan(sample: Sample, markers: Mapping[str, set[int]], deadline: float) -> Scan:
    """Read until the deadline. `markers`: special values (padding, ignore index), by field."""
    found = Scan(num_samples=sample.num_samples)
    try:
        for read in sample.batches():
            found.num_batches += 1
            found.num_rows += read.size
            if read.size == 0:
                found.empty_batches.append(read.position)
            for path, leaf in named_tensors(read.batch):
                known = found.fields.setdefault(path, Field(leaf.dtype, tuple(leaf.shape[1:])))
                _look(known, leaf, read, markers.get(path, set()))
            if time.perf_counter() > deadline:
                return found
        found.is_whole = True
    except CannotRead as error:
        found.error = error
    return found


def _look(known: Field, leaf: Tensor, read: Read, markers: set[int]) -> None:
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_complex() or leaf.element_size() == 0:
        return
    if leaf.dim() == 0 or leaf.shape[0] != read.size or read.size == 0:
        leaf, rows = leaf.reshape(1, -1), 1
    else:
        rows = leaf.shape[0]
    known.num_rows += rows
    flat = leaf.reshape(rows, math.prod(leaf.shape[1:]))
    if flat.shape[1] == 0:
        known.empty.add(read, torch.ones(rows, dtype=torch.bool))
        return
    if leaf.is_floating_point():
        flat = flat.float() if leaf.element_size() < 4 else flat
        finite = torch.isfinite(flat)
        known.nan.add(read, flat.isnan().any(1))
        known.inf.add(read, flat.isinf().any(1))
        if flat.shape[1] > 1:
            known.all_zero.add(read, (flat == 0).all(1))
        zeros = torch.zeros((), dtype=flat.dtype, device=flat.device)
        known.peaks += torch.where(finite, flat, zeros).abs().amax(1).tolist()
        lows, highs = flat.masked_fill(~finite, math.inf), flat.masked_fill(~finite, -math.inf)
    elif leaf.dtype is torch.bool:
        return
    else:
        lows = highs = flat
        _look_at_integers(known, flat, leaf, read, markers)
    _widen(known, lows, highs, read, leaf.is_floating_point())
    _note_extremes(known, torch.nan_to_num(flat.float()), read)


def _note_extremes(known: Field, flat: Tensor, read: Read) -> None:
    """Remember the batches with the most extreme first, last, mean, smallest and largest values of a sample."""
    properties = {
        "first": flat[:, 0],
        "last": flat[:, -1],
        "mean": flat.mean(1),
        "min": flat.amin(1),
        "max": flat.amax(1),
    }
    for name, values in properties.items():
        for sign, extreme in ((1.0, float(values.max())), (-1.0, float(values.min()))):
            best = known.extremes.setdefault(f"{name} {sign:+.0f}", [])
            if len(best) < NUM_EXTREMES or sign * extreme > best[-1][0]:
                best.append((sign * extreme, read.position))
                best.sort(reverse=True)
                del best[NUM_EXTREMES:]


def _widen(known: Field, lows: Tensor, highs: Tensor, read: Read, per_feature: bool) -> None:
    low, high = lows.amin(1), highs.amax(1)
    if float(low.min()) < known.minimum[0]:
        known.minimum = (float(low.min()), read.name(int(low.argmin())))
    if float(high.max()) > known.maximum[0]:
        known.maximum = (float(high.max()), read.name(int(high.argmax())))
    if not per_feature or lows.shape[1] > 1_000_000:
        return
    low, high = lows.amin(0), highs.amax(0)
    if known.low is None or known.high is None:
        known.low, known.high = low, high
    elif known.low.shape == low.shape:
        known.low, known.high = torch.minimum(known.low, low), torch.maximum(known.high, high)


def _look_at_integers(known: Field, flat: Tensor, leaf: Tensor, read: Read, markers: set[int]) -> None:
    if flat.shape[1] > 1:
        same = (flat == flat[:, :1]).all(1)
        for value in sorted(set(flat[same, 0].tolist()))[:KEPT]:
            known.all_same.setdefault(int(value), Rows()).add(read, same & (flat[:, 0] == value))
    if bool((flat < 0).any()):
        for value in sorted(set(flat[flat < 0].tolist()))[:KEPT]:
            row = int((flat == value).any(1).nonzero()[0])
            known.negatives.setdefault(int(value), read.name(row))
    for marker in markers:
        is_marker = flat == marker
        known.with_marker.setdefault(marker, Rows()).add(read, is_marker.any(1))
        if leaf.dim() == 2 and leaf.shape[1] > 2:
            other = (~is_marker).int()
            between = is_marker & (other.cumsum(1) > 0) & (other.flip(1).cumsum(1).flip(1) > 0)
            known.interior.setdefault(marker, Rows()).add(read, between.any(1))
