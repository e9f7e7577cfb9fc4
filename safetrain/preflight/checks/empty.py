"""Check for samples in which there is nothing to learn, or whose loss is 0/0."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ...core.numbers import listed
from ...forensics.replay import fresh
from ...forensics.samples_of import select
from ..outcome import Outcome, Problems, failed, passed, warned, worst
from ..registry import preflight_check
from ..sample import Read
from ..scan import Field, Rows
from ..subject import Subject
from .data import FEW


@preflight_check(
    looks_at="samples without content: no values, nothing but padding, all ignored",
    fails="one has no value, or its loss is not finite",
    warns="one has nothing to learn, or is all zeros",
    fix="leave out the samples named, or let the loss count them as 0",
)
def empty_samples(subject: Subject) -> Outcome:
    problems = Problems()
    for path, known in subject.fields():
        if known.empty.count:
            problems.fail(
                f"field {path!r} has no value at all in {known.empty.count} samples: {listed(known.empty.names)}",
                f"leave out {known.empty.spoken}",
                field=path,
                samples=known.empty.names,
            )
        for value, rows in known.all_same.items():
            problems += _without_content(subject, path, known, value, rows)
        rows = known.all_zero
        if rows.count and rows.count <= 0.5 * known.num_rows and math.prod(known.shape) >= FEW:
            problems.warn(
                f"field {path!r} is all zeros in {rows.count} of {known.num_rows} samples: {listed(rows.names)}",
                f"leave out {rows.spoken} if there is nothing in them",
                field=path,
                samples=rows.names,
            )
    return worst(problems, passed(f"none in {subject.scan.seen}", **subject.seen))


def _without_content(subject: Subject, path: str, known: Field, value: int, rows: Rows) -> Iterator[Outcome]:
    """Sequences that repeat one value: an outcome if the loss of such a sample is not finite, or it is all ignored."""
    read, row = next(iter(rows.batches.values()))
    loss, usual = _loss_of(subject, read, row), _loss_of(subject, subject.healthy[0], 0)
    numbers = {"field": path, "samples": rows.names, "num_samples": rows.count}
    which = f"{rows.count} of {known.num_rows} samples: {listed(rows.names)}"
    if math.isfinite(usual) and not math.isfinite(loss):
        yield failed(
            f"field {path!r} is nothing but {value} in {which}; the loss of such a sample is {loss}",
            f"leave out {rows.spoken}, or let the loss count them as 0 (divide by the number of values, at least 1)",
            **numbers,
        )
    elif any(
        value == c.arguments["ignore_index"] for c in subject.loss_calls if c.field == path and c.has_class_indices
    ):
        yield warned(
            f"field {path!r} is nothing but the ignore index {value} in {which}",
            f"leave out {rows.spoken}: there is nothing to learn in them",
            **numbers,
        )


def _loss_of(subject: Subject, read: Read, row: int) -> float:
    """The loss of one sample alone; NaN also if the model cannot run a batch of one (BatchNorm, say)."""
    with subject.clean(), torch.no_grad():
        try:
            return float(subject.forward(select(fresh(read.batch), [row], read.size)))
        except Exception:
            return math.nan
