"""Check for duplicate samples: within the training data, or in training and evaluation data."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ...tensors.nest import tensors_in
from ..outcome import Outcome, Problems, passed, skipped, worst
from ..registry import preflight_check
from ..sample import CannotRead, Sample
from ..subject import Subject

FEWEST_VALUES = 8
"""Different numbers that a sample must have to be told from others for certain."""
LEAKED, DUPLICATES = 0.02, 0.1
"""Shares from which on it is no chance."""


@preflight_check(
    looks_at="samples that are in the training data twice, or in the evaluation data too",
    warns="2% of the evaluation samples are also trained on, or a tenth of the training samples are copies of others",
    fix="split the data before anything else, and by what the samples come from",
)
def duplicates(subject: Subject) -> Outcome:
    """By the bits of their numbers; of samples with few different ones (classes, small counts) nothing is said."""
    trained = _digests(subject, subject.sample, 0.05)
    evaluated: Counter[int] = Counter()
    streams = subject.trainer.evaluation.streams
    for stream in streams.values():
        evaluated += _digests(subject, Sample(subject.trainer, stream), 0.05 / len(streams))
    if not trained:
        return skipped("no sample has enough different numbers to be told from others")
    problems = Problems()
    total, seen = sum(evaluated.values()), sum(trained.values())
    leaked = sum(count for digest, count in evaluated.items() if digest in trained)
    if leaked > max(2, LEAKED * total):
        problems.warn(
            f"{leaked} of {total} evaluation samples are in the training data too: the evaluation says too much",
            "leave them out of one of the two; split by what the samples come from (person, document, day)",
            leaked=leaked,
        )
    copies = seen - len(trained)
    if copies > max(2, DUPLICATES * seen):
        problems.warn(
            f"{copies} of {seen} training samples are copies of others",
            "leave the copies out, or weight the samples instead; look at how the data was put together",
            copies=copies,
        )
    about = f", {leaked or 'none'} of {total} evaluation samples among them" if streams else ""
    return worst(problems, passed(f"{seen} samples, {copies} of them copies{about}"))


def _digests(subject: Subject, sample: Sample, share: float) -> Counter[int]:
    found: Counter[int] = Counter()
    deadline = subject.budget.deadline(share)
    with subject.clean():
        try:
            for read in sample.batches():
                found.update(_of_rows(read.batch))
                if time.perf_counter() > deadline:
                    break
        except CannotRead:
            pass  # `readable` reports it
    return found


def _of_rows(batch: Any) -> list[int]:
    """One number for each sample, made of the first floating-point field that is large enough."""
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and tensor.dim() > 1 and len(tensor) and tensor[0].numel() >= FEWEST_VALUES:
            return _digest(tensor.detach())
    return []


def _digest(rows: Tensor) -> list[int]:
    flat = rows.flatten(1).double().cpu().nan_to_num()
    factors = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64).sqrt()
    sums = (flat * factors).sum(1).view(torch.int64).tolist()
    return [number for number, row in zip(sums, flat, strict=True) if len(row.unique()) >= FEWEST_VALUES]
