"""Checks of the training data: it is read, nothing is trained."""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from ..core.numbers import amount, listed
from ..forensics.replay import fresh
from ..forensics.samples_of import select
from .outcome import Outcome, Unavailable, failed, passed, skipped, warned, worst
from .sample import Read
from .scan import Field, Rows
from .subject import Subject

FEW = 8
"""With fewer samples, their differences are not judged."""
OUTLIER = 1e3
LARGE = 1e4


def readable(subject: Subject) -> Outcome:
    scan = subject.scan
    if scan.error is not None:
        place = traceback.extract_tb(scan.error.error.__traceback__)[-1]
        return failed(
            f"{scan.error} ({place.filename}:{place.lineno})",
            f"repair or leave out {scan.error.where}, so that every sample can be read and put into a batch",
            where=scan.error.where,
        )
    if scan.num_batches == 0:
        return failed(
            "the training data gives no batch",
            "check the path and the length of the data set; with data.drop_last there must be at least data.batch_size samples",
        )
    if scan.empty_batches:
        return failed(
            f"batch {listed(scan.empty_batches)} holds no sample",
            "leave empty batches out where the data is made",
            batches=scan.empty_batches[:64],
        )
    fields = [f"{path or 'batch'} {_dtype(known)}{list(known.shape)}" for path, known in scan.fields.items()]
    return passed(f"{scan.seen} in {scan.num_batches} batches: {listed(fields)}", **seen(subject))


def finite(subject: Subject) -> Outcome:
    problems = []
    for path, known in _fields(subject):
        for kind, rows in (("NaN", known.nan), ("Inf", known.inf)):
            if rows.count:
                fill = "nanmean of its column" if kind == "NaN" else "a bound that the data has"
                problems.append(
                    failed(
                        f"field {path!r} has {kind} in {rows.count} of {known.num_rows} samples: {listed(rows.names)}",
                        f"fill it in where the data is read (the {fill}, say), or leave out {_samples(rows)}",
                        field=path,
                        samples=rows.names,
                        num_samples=rows.count,
                    )
                )
    return worst(problems, passed(f"every number of {subject.scan.seen} is finite", **seen(subject)))


def scale(subject: Subject) -> Outcome:
    problems = []
    largest = {}
    for path, known in _fields(subject):
        if not known.peaks:
            continue
        peak, typical = max(known.peaks), statistics.median(known.peaks)
        largest[path] = peak
        name = known.maximum[1] if known.maximum[0] >= -known.minimum[0] else known.minimum[1]
        numbers = {"field": path, "largest": peak, "typical": typical, "sample": name}
        if len(known.peaks) >= FEW and typical > 0 and peak > OUTLIER * typical:
            problems.append(
                warned(
                    f"field {path!r} reaches {amount(peak)} in sample {name}, {amount(peak / typical)} times the typical {amount(typical)}",
                    f"look at sample {name}: rescale it like the others, clip it, or leave it out",
                    **numbers,
                )
            )
        elif typical > LARGE:
            problems.append(
                warned(
                    f"field {path!r} has values around {amount(typical)}",
                    "standardise it where the data is read: (x - mean) / std, or divide it by its largest value",
                    **numbers,
                )
            )
    if not largest:
        return skipped("the batches hold no floating-point field")
    peaks = [f"{path or 'batch'} at most {amount(value)}" for path, value in largest.items()]
    return worst(problems, passed(listed(peaks), **seen(subject)))


def constant_features(subject: Subject) -> Outcome:
    problems = []
    fields = [(path, known) for path, known in _fields(subject) if known.low is not None and known.high is not None]
    if not fields:
        return skipped("the batches hold no floating-point field")
    if max(known.num_rows for _, known in fields) < FEW:
        return skipped(f"only {subject.scan.seen} to compare")
    num_features = 0
    is_constant = []
    for path, known in fields:
        constant = _per_feature(known)
        num_features += len(constant)
        is_constant.append(known.minimum[0] == known.maximum[0])
        columns = constant.nonzero().flatten().tolist()
        if columns and not is_constant[-1]:
            what = "channel" if len(known.shape) == 3 else "feature"
            problems.append(
                warned(
                    f"field {path!r}: {what} {listed(columns)} of {len(constant)} has the same value in {subject.scan.seen}",
                    f"leave out {what} {listed(columns)}, or repair where it is read; if it is to be standardised, that is a division by 0",
                    field=path,
                    features=columns[:64],
                )
            )
    if all(is_constant):
        return failed(
            f"no floating-point field differs from sample to sample: {listed([path for path, _ in fields])}",
            "read the data itself, not a placeholder: all samples look the same to the model",
            **seen(subject),
        )
    for (path, known), constant_field in zip(fields, is_constant, strict=True):
        value = known.maximum[0]
        if constant_field and value not in (0.0, 1.0):  # a mask or sample weights may be all zeros or all ones
            problems.append(
                warned(
                    f"field {path!r} is {amount(value)} in {subject.scan.seen}",
                    f"leave field {path!r} out, or repair where it is read",
                    field=path,
                )
            )
    return worst(
        problems,
        passed(
            f"{num_features} feature{'s' if num_features != 1 else ''}, none constant in {subject.scan.seen}",
            **seen(subject),
        ),
    )


def empty_samples(subject: Subject) -> Outcome:
    problems = []
    for path, known in _fields(subject):
        if known.empty.count:
            problems.append(
                failed(
                    f"field {path!r} has no value at all in {known.empty.count} samples: {listed(known.empty.names)}",
                    f"leave out {_samples(known.empty)}",
                    field=path,
                    samples=known.empty.names,
                )
            )
        for value, rows in known.all_same.items():
            problems += _without_content(subject, path, known, value, rows)
        rows = known.all_zero
        if rows.count and rows.count <= 0.5 * known.num_rows and math.prod(known.shape) >= FEW:
            problems.append(
                warned(
                    f"field {path!r} is all zeros in {rows.count} of {known.num_rows} samples: {listed(rows.names)}",
                    f"leave out {_samples(rows)} if there is nothing in them",
                    field=path,
                    samples=rows.names,
                )
            )
    return worst(problems, passed(f"none in {subject.scan.seen}", **seen(subject)))


def _without_content(subject: Subject, path: str, known: Field, value: int, rows: Rows) -> Iterator[Outcome]:
    """Sequences that repeat one value: an outcome if the loss of such a sample is not finite, or it is all ignored."""
    read, row = next(iter(rows.batches.values()))
    loss, usual = _loss_of(subject, read, row), _loss_of(subject, subject.healthy[0], 0)
    numbers = {"field": path, "samples": rows.names, "num_samples": rows.count}
    which = f"{rows.count} of {known.num_rows} samples: {listed(rows.names)}"
    if math.isfinite(usual) and not math.isfinite(loss):
        yield failed(
            f"field {path!r} is nothing but {value} in {which}; the loss of such a sample is {loss}",
            f"leave out {_samples(rows)}, or let the loss count them as 0 (divide by the number of values, at least 1)",
            **numbers,
        )
    elif any(
        value == c.arguments["ignore_index"] for c in subject.loss_calls if c.field == path and c.has_class_indices
    ):
        yield warned(
            f"field {path!r} is nothing but the ignore index {value} in {which}",
            f"leave out {_samples(rows)}: there is nothing to learn in them",
            **numbers,
        )


def _loss_of(subject: Subject, read: Read, row: int) -> float:
    """The loss of one sample alone; NaN also if the model cannot run a batch of one (BatchNorm, say)."""
    with subject.clean(), torch.no_grad():
        try:
            return float(subject.forward(select(fresh(read.batch), [row], read.size)))
        except Exception:
            return math.nan


def _per_feature(known: Field) -> torch.Tensor:
    """Which features are constant: the columns of a table, the channels of an image, the last dimension of a sequence."""
    assert known.low is not None
    assert known.high is not None
    low, high = known.low.reshape(known.shape or (1,)), known.high.reshape(known.shape or (1,))
    if len(known.shape) == 3:
        low, high = low.flatten(1).amin(1), high.flatten(1).amax(1)
    elif len(known.shape) == 2:
        low, high = low.amin(0), high.amax(0)
    return (low == high).flatten().cpu()


def _fields(subject: Subject) -> Iterator[tuple[str, Field]]:
    if subject.scan.num_rows == 0:
        raise Unavailable("no sample could be read, see readable")
    yield from subject.scan.fields.items()


def _samples(rows: Rows) -> str:
    return f"sample{'s' if rows.count > 1 else ''} {listed(rows.names)}"


def seen(subject: Subject) -> dict[str, Any]:
    return {"seen": subject.scan.num_rows, "of": subject.scan.num_samples}


def _dtype(known: Field) -> str:
    return str(known.dtype).removeprefix("torch.")
