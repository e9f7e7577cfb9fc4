"""Checks of the training data: it is read, nothing is trained."""

from __future__ import annotations

import statistics
import traceback

import torch

from ...core.numbers import amount, listed
from ..outcome import Outcome, Problems, failed, passed, skipped, worst
from ..registry import preflight_check
from ..scan import Field
from ..subject import Subject

FEW = 8
"""With fewer samples, their differences are not judged."""
OUTLIER = 1e3
LARGE = 1e4


@preflight_check(
    looks_at="every sample can be read and put into a batch",
    fails="reading raises, there is no batch, or a batch holds no sample",
    fix="repair or leave out the samples named",
)
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
    fields = [
        f"{path or 'batch'} {str(known.dtype).removeprefix('torch.')}{list(known.shape)}"
        for path, known in scan.fields.items()
    ]
    return passed(f"{scan.seen} in {scan.num_batches} batches: {listed(fields)}", **subject.seen)


@preflight_check(
    looks_at="NaN and Inf in the data",
    fails="a field holds one",
    fix="fill it in where the data is read, or leave out the samples named",
)
def data_finite(subject: Subject) -> Outcome:
    problems = Problems()
    for path, known in subject.fields():
        for kind, rows in (("NaN", known.nan), ("Inf", known.inf)):
            if rows.count:
                fill = "nanmean of its column" if kind == "NaN" else "a bound that the data has"
                problems.fail(
                    f"field {path!r} has {kind} in {rows.count} of {known.num_rows} samples: {listed(rows.names)}",
                    f"fill it in where the data is read (the {fill}, say), or leave out {rows.spoken}",
                    field=path,
                    samples=rows.names,
                    num_samples=rows.count,
                )
    return worst(problems, passed(f"every number of {subject.scan.seen} is finite", **subject.seen))


@preflight_check(
    looks_at="outliers, and fields that are not standardised",
    warns="a sample is 1,000 times the typical one, or the typical value is above 10,000",
    fix="rescale, clip or leave out the sample named; standardise the field",
)
def data_scale(subject: Subject) -> Outcome:
    problems = Problems()
    largest = {}
    for path, known in subject.fields():
        if not known.peaks:
            continue
        peak, typical = max(known.peaks), statistics.median(known.peaks)
        largest[path] = peak
        name = known.maximum[1] if known.maximum[0] >= -known.minimum[0] else known.minimum[1]
        numbers = {"field": path, "largest": peak, "typical": typical, "sample": name}
        if len(known.peaks) >= FEW and typical > 0 and peak > OUTLIER * typical:
            problems.warn(
                f"field {path!r} reaches {amount(peak)} in sample {name}, {amount(peak / typical)} times the typical {amount(typical)}",
                f"look at sample {name}: rescale it like the others, clip it, or leave it out",
                **numbers,
            )
        elif typical > LARGE:
            problems.warn(
                f"field {path!r} has values around {amount(typical)}",
                "standardise it where the data is read: (x - mean) / std, or divide it by its largest value",
                **numbers,
            )
    if not largest:
        return skipped("the batches hold no floating-point field")
    peaks = [f"{path or 'batch'} at most {amount(value)}" for path, value in largest.items()]
    return worst(problems, passed(listed(peaks), **subject.seen))


@preflight_check(
    looks_at="features that never change",
    fails="no field differs from sample to sample",
    warns="a column, a channel or a whole field is constant",
    fix="leave it out, or repair where it is read",
)
def constant_features(subject: Subject) -> Outcome:
    problems = Problems()
    fields = [(path, known) for path, known in subject.fields() if known.low is not None and known.high is not None]
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
            problems.warn(
                f"field {path!r}: {what} {listed(columns)} of {len(constant)} has the same value in {subject.scan.seen}",
                f"leave out {what} {listed(columns)}, or repair where it is read; if it is to be standardised, that is a division by 0",
                field=path,
                features=columns[:64],
            )
    if all(is_constant):
        return failed(
            f"no floating-point field differs from sample to sample: {listed([path for path, _ in fields])}",
            "read the data itself, not a placeholder: all samples look the same to the model",
            **subject.seen,
        )
    for (path, known), constant_field in zip(fields, is_constant, strict=True):
        value = known.maximum[0]
        if constant_field and value not in (0.0, 1.0):  # a mask or sample weights may be all zeros or all ones
            problems.warn(
                f"field {path!r} is {amount(value)} in {subject.scan.seen}",
                f"leave field {path!r} out, or repair where it is read",
                field=path,
            )
    features = f"{num_features} feature{'s' if num_features != 1 else ''}"
    return worst(problems, passed(f"{features}, none constant in {subject.scan.seen}", **subject.seen))


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
