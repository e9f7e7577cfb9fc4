"""What can be wrong with a batch, and in which of its samples.

A field of a batch is named by its path: `inputs.mask` in nested dicts and dataclasses, `0` and `1` in a pair.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ..core.numbers import listed
from ..tensors.gradients import peak
from ..tensors.nest import named_tensors, num_samples, tensors_in


def output_shapes(output: Any) -> set[tuple[int, ...]]:
    return {tuple(leaf.shape) for leaf in tensors_in(output) if leaf.is_floating_point()}


def is_named(path: str, globs: Iterable[str]) -> bool:
    """A glob matches the whole path or its last part."""
    return any(fnmatchcase(name, glob) for name in (path, path.rpartition(".")[2]) for glob in globs)


@dataclass(frozen=True)
class Problem:
    kind: str
    """`nonfinite`, `labels`, `empty` or `dtype`."""
    micro_batch: int
    """Its index in the window."""
    field: str
    detail: str
    rows: tuple[int, ...] = ()
    """Samples of that micro-batch, by index along the first dimension; empty when it cannot be said which."""

    def __str__(self) -> str:
        rows = f" in row {listed(self.rows, 8)}" if self.rows else ""
        return f"field {self.field!r} {self.detail}{rows}"


@dataclass(frozen=True)
class Checks:
    """What to look for. `dtypes` are those of healthy batches by field, `shapes` those of the model's outputs."""

    ignore: Sequence[str] = ()
    labels: Sequence[str] = ()
    ignore_index: int = -100
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shapes: Iterable[tuple[int, ...]] = ()

    @torch.no_grad()
    def num_bad(self, window: Sequence[Any], like: Tensor) -> Tensor:
        """How many things are wrong, 0-d, with the device and type of `like`. Stays on the device."""
        leaves = [leaf for batch in window for leaf in self._fields(batch)]
        num_empty = sum(num_samples(batch) == 0 for batch in window)
        num_wrong = sum(self._has_wrong_dtype(path, leaf) for path, leaf in leaves)
        num_bad = like.new_full((), num_empty + num_wrong)
        largest = peak([leaf for _, leaf in leaves if _can_be_nonfinite(leaf)])
        if largest is not None:
            num_bad += ~torch.isfinite(largest)
        for _, leaf, num in self._labels(leaves):
            num_bad += _outside(leaf, num, self.ignore_index).sum()
        return num_bad

    @torch.no_grad()
    def problems(self, window: Sequence[Any]) -> list[Problem]:
        """All that is wrong, with the rows. Waits for the device: only for a step that is in trouble."""
        return [problem for index, batch in enumerate(window) for problem in self._problems(index, batch)]

    def _problems(self, index: int, batch: Any) -> Iterator[Problem]:
        fields, size = list(self._fields(batch)), num_samples(batch)
        if size == 0:
            yield Problem("empty", index, fields[0][0] if fields else "", "is empty")
        for path, leaf in fields:
            if self._has_wrong_dtype(path, leaf):
                yield Problem("dtype", index, path, f"is {_dtype(leaf)}, in healthy batches {self.dtypes[path]}")
            if _can_be_nonfinite(leaf) and bool((bad := ~torch.isfinite(leaf)).any()):
                kind = "NaN" if bool(torch.isnan(leaf).any()) else "Inf"
                yield Problem("nonfinite", index, path, f"holds {int(bad.sum())} {kind}", _rows(bad, size))
        for path, leaf, num in self._labels(fields):
            if bool((bad := _outside(leaf, num, self.ignore_index)).any()):
                detail = f"holds the label {int(leaf[bad][0])}, outside the {num} classes of the model's output"
                yield Problem("labels", index, path, detail, _rows(bad, size))

    def _fields(self, batch: Any) -> Iterator[tuple[str, Tensor]]:
        return ((path, leaf) for path, leaf in named_tensors(batch) if not is_named(path, self.ignore))

    def _has_wrong_dtype(self, path: str, leaf: Tensor) -> bool:
        return self.dtypes.get(path, _dtype(leaf)) != _dtype(leaf)

    def _labels(self, fields: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, int]]:
        """Integer fields that are labels, with the number of classes of the output that they fit."""
        for path, leaf in fields:
            if leaf.dtype in (torch.int64, torch.int32) and is_named(path, self.labels):
                if (num := _num_classes(tuple(leaf.shape), self.shapes)) > 1:
                    yield path, leaf, num


def dtypes(window: Sequence[Any]) -> dict[str, str]:
    """The type of each field of the first micro-batch."""
    return {path: _dtype(leaf) for batch in window[:1] for path, leaf in named_tensors(batch)}


def sentence(problems: Sequence[Problem]) -> str:
    """For people. A rank without a problem of its own refuses because of another one: the counts of all ranks are added up."""
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(map(str, problems[:3])) + more or "bad data on another rank"


def bad_rows(problems: Sequence[Problem]) -> dict[int, list[int]]:
    """The rows with a problem, by micro-batch."""
    rows: dict[int, set[int]] = {}
    for problem in problems:
        rows.setdefault(problem.micro_batch, set()).update(problem.rows)
    return {index: sorted(found) for index, found in rows.items()}


def evidence(problems: Sequence[Problem], rows: Mapping[int, Sequence[int]], window: Sequence[Any]) -> dict[str, Any]:
    """For a verdict: `samples` counts through the window, `rows` are by micro-batch."""
    starts = list(itertools.accumulate(map(num_samples, window), initial=0))
    return {
        "signal": problems[0].kind if problems else "other_rank",
        "value": problems[0].detail if problems else "",
        "fields": list(dict.fromkeys(problem.field for problem in problems)),
        "samples": [starts[index] + row for index, found in rows.items() for row in found],
        "rows": dict(rows),
    }


def _dtype(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _can_be_nonfinite(leaf: Tensor) -> bool:
    # float8 has no kernels for this, and sparse or nested tensors have no rows.
    wide = (leaf.is_floating_point() or leaf.is_complex()) and leaf.element_size() > 1
    return wide and leaf.layout == torch.strided and not leaf.is_nested


def _num_classes(labels: tuple[int, ...], outputs: Iterable[tuple[int, ...]]) -> int:
    """The C of an output of shape (N, C, …) or (N, …, C) for labels of shape (N, …); 0 if no output fits.

    The largest, when several outputs fit: a hidden state may have the same leading dimensions as the logits.
    """
    last = [shape[-1] for shape in outputs if shape[:-1] == labels]
    second = [shape[1] for shape in outputs if len(shape) > 1 and shape[:1] + shape[2:] == labels]
    return max([*last, *second], default=0)


def _outside(labels: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    return ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)


def _rows(bad: Tensor, size: int) -> tuple[int, ...]:
    if bad.dim() == 0 or bad.shape[0] != size:
        return ()
    return tuple(bad.reshape(size, -1).any(dim=1).nonzero().flatten().tolist())
