"""Checks of the integer inputs of losses and embeddings: labels, token indices, padding."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...core.numbers import amount, listed
from ..outcome import Outcome, Problems, failed, graded, passed, skipped, worst
from ..registry import preflight_check
from ..scan import Field, Rows
from ..subject import Subject


@preflight_check(
    looks_at="labels against the classes of the output, indices against the embedding, shapes of targets against outputs",
    fails="one is out of range, there is only one class, or the shapes differ",
    fix="number classes from 0, give the model more outputs, pass `ignore_index`, or reshape the targets",
)
def labels(subject: Subject) -> Outcome:
    calls = subject.loss_calls
    problems = [*_wrong_labels(subject), *_wrong_shapes(subject), *_wrong_indices(subject)]
    facts = [f"labels fit {call.num_classes} classes" for call in calls if call.has_class_indices]
    lookups = subject.observed.observer.lookups
    facts += [f"indices fit {lookup.num_embeddings} embeddings" for lookup in lookups if lookup.field]
    facts += [
        f"targets have the shape of the outputs, {list(call.input_shape)}" for call in calls if not call.num_classes
    ]
    if not facts and not problems:
        return skipped("no loss function of torch and no embedding is used")
    return worst(problems, passed(listed(list(dict.fromkeys(facts))), **subject.seen))


def _wrong_labels(subject: Subject) -> Iterator[Outcome]:
    for call in subject.loss_calls:
        if not call.has_class_indices:
            continue
        num, ignored = call.num_classes, call.arguments["ignore_index"]
        known = subject.scan.fields.get(call.field or "") if call.field is not None else None
        if known is not None:
            highest, sample = known.maximum
            wrong = {value: name for value, name in known.negatives.items() if value != ignored}
            if known.minimum[0] == highest and known.num_rows >= 32 and not known.shape:
                yield failed(
                    f"field {call.field!r} is {amount(highest)} in {subject.scan.seen}: there is only one class",
                    "read samples of all classes (a sorted data set that is cut off has only the first)",
                )
        else:
            values = call.target[call.target != ignored]
            highest, sample = (float(values.max()), "of the first batches") if values.numel() else (-1.0, "")
            wrong = {int(v): "of the first batches" for v in set(values[values < 0].tolist())}
        where = f"field {call.field!r}" if call.field is not None else "the target of the loss"
        if highest >= num and int(highest) != ignored:
            yield failed(
                f"{where} holds the label {int(highest)} (sample {sample}), the output has {num} classes: 0 to {num - 1}",
                f"give the model {int(highest) + 1} outputs, or number the classes from 0",
                label=int(highest),
                num_classes=num,
                sample=sample,
            )
        for value, name in list(wrong.items())[:1]:
            yield failed(
                f"{where} holds the label {value} (sample {name}), which is neither a class nor the ignore index {ignored}",
                f"number the classes from 0; if {value} means 'no label', pass ignore_index={value} to the loss",
                label=value,
                num_classes=num,
                sample=name,
            )


def _wrong_shapes(subject: Subject) -> Iterator[Outcome]:
    for call in subject.loss_calls:
        if call.num_classes or call.input_shape == call.target_shape or math.prod(call.target_shape) <= 1:
            continue
        yield failed(
            f"{call.kind} compares outputs {list(call.input_shape)} with targets {list(call.target_shape)}: they broadcast to all pairs",
            f"bring both to one shape, e.g. targets.reshape({', '.join(map(str, (-1, *call.input_shape[1:])))})",
            output_shape=list(call.input_shape),
            target_shape=list(call.target_shape),
        )


def _wrong_indices(subject: Subject) -> Iterator[Outcome]:
    for lookup in subject.observed.observer.lookups:
        known = subject.scan.fields.get(lookup.field) if lookup.field is not None else None
        if known is None:
            continue
        highest, sample = known.maximum
        lowest, low_sample = known.minimum
        if highest >= lookup.num_embeddings or lowest < 0:
            value, name = (highest, sample) if highest >= lookup.num_embeddings else (lowest, low_sample)
            yield failed(
                f"field {lookup.field!r} holds the index {int(value)} (sample {name}), the embedding has {lookup.num_embeddings}",
                f"give the embedding {int(value) + 1} rows, or use the vocabulary that the data was encoded with"
                if value > 0
                else "encode unknown values as an index of their own, not as a negative number",
                index=int(value),
                num_embeddings=lookup.num_embeddings,
            )
            return


@preflight_check(
    looks_at="an `ignore_index` or `padding_idx` that is also a real class or token",
    fails="a class is ignored, or the padding stands inside more than a tenth of the sequences",
    warns="the padding stands inside fewer sequences",
    fix="give padding a number of its own",
)
def padding(subject: Subject) -> Outcome:
    """Whether an ignore_index or padding_idx is also used as a real class or token."""
    problems = Problems()
    in_use = []
    for call in subject.loss_calls:
        if not call.has_class_indices or call.field is None:
            continue
        ignored = call.arguments["ignore_index"]
        known = subject.scan.fields[call.field]
        marked = known.with_marker.get(ignored, Rows())
        if marked.count:
            in_use.append(f"ignore index {ignored} in {marked.count} of {known.num_rows} samples")
        if not 0 <= ignored < call.num_classes or not marked.count:
            continue
        inside = known.interior.get(ignored, Rows())
        if not known.shape:
            problems.fail(
                f"class {ignored} is also the ignore index: {marked.count} of {known.num_rows} samples never count in the loss",
                "leave ignore_index at its default (-100), or use an index for 'no label' that is not a class",
                field=call.field,
                ignore_index=ignored,
                num_samples=marked.count,
            )
        elif inside.count:
            problems.append(_inside(call.field, f"the ignore index {ignored}", ignored, inside, known))
    for lookup in subject.observed.observer.lookups:
        if lookup.padding_idx is None or lookup.field is None:
            continue
        known = subject.scan.fields[lookup.field]
        marked = known.with_marker.get(lookup.padding_idx, Rows())
        if marked.count:
            in_use.append(f"padding index {lookup.padding_idx} in {marked.count} of {known.num_rows} samples")
        inside = known.interior.get(lookup.padding_idx, Rows())
        if inside.count:
            problems.append(
                _inside(lookup.field, f"the padding index {lookup.padding_idx}", lookup.padding_idx, inside, known)
            )
    if not in_use and not problems:
        return skipped("no field holds an ignore_index of the loss or a padding_idx of an embedding")
    return worst(problems, passed(listed(list(dict.fromkeys(in_use))), **subject.seen))


def _inside(path: str, what: str, value: int, inside: Rows, known: Field) -> Outcome:
    return graded(
        inside.count > 0.1 * known.num_rows,
        f"{what} stands between other values of field {path!r} in {inside.count} of {known.num_rows} samples: {listed(inside.names)}",
        f"give padding a number of its own: {value} is used for both padding and a real value, which is never learned",
        field=path,
        index=value,
        samples=inside.names,
        num_samples=inside.count,
    )
