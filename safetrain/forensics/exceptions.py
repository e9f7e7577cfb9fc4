"""Why a step raised: a value was already bad, a value was out of range, some samples are bad, or the program is wrong.

Whether an exception is about numbers is not read off its message alone. The step is replayed with tracing, and a bad value
that came before the exception is its origin if the exception goes away, or becomes another, when that value is made finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .finding import LOSS, Finding, finding_of
from .frames import innermost_module, stack_of, user_place
from .provenance import Blame, Provenance, primary
from .raised import complains_of_bad_values, is_numeric, is_of_the_program
from .remedies import cast_bad_to_zero, zeroed
from .replay import Replayer, Trace
from .samples_of import batch_size, select
from .tracer import Event, Intervention

MAX_BLAMES = 3
"""Bad values that are made finite, one after the other, to see whether the exception goes away."""


def locate_error(trace: Trace, replayer: Replayer) -> Finding | None:
    """Where the bad value began, or where it was raised; None when neither numbers nor samples have to do with it."""
    error = trace.error
    assert error is not None
    replayer.max_operations = 4 * len(trace.tracer.events) + 20_000
    provenance = Provenance(trace.tracer, trace.leaves)
    is_complaint = complains_of_bad_values(error)
    if is_complaint or not is_of_the_program(error):
        for blame in _blames(trace, provenance):
            if is_complaint or _goes_away(blame, trace, replayer):
                return finding_of(trace, provenance, blame, type(error).__name__, replayer)
    if is_numeric(error):
        return _place_of(error, trace, provenance, replayer)
    if not is_of_the_program(error) and _depends_on_samples(trace, replayer):
        finding = _place_of(error, trace, provenance, replayer)
        finding.raised_by_samples = True
        return finding
    return None


def _place_of(error: Exception, trace: Trace, provenance: Provenance, replayer: Replayer) -> Finding:
    frames = stack_of(error.__traceback__)
    finding = Finding(trace, provenance, Blame(None), "forward", type(error).__name__, error=error)
    finding.place, finding.frames = user_place(frames), frames
    inner = innermost_module(frames, replayer.module_names)
    finding.module, finding.module_type = (inner[0], type(inner[1]).__name__) if inner else (LOSS, None)
    finding.op = finding.name = trace.tracer.api.that_raised(error) or getattr(error, "function", type(error).__name__)
    return finding


def _blames(trace: Trace, provenance: Provenance) -> Iterator[Blame]:
    """Where bad values of the step began, those that were computed last before the exception first."""
    seen: list[Event | str] = []
    for event in reversed(trace.tracer.events):
        if not event.kind_out or event.uninitialised or event.literal:
            continue
        worst = max(event.writes, key=lambda access: access.kind)
        blame = primary(provenance.origins(worst.region, worst.kind))
        if blame is None or blame.intended:
            continue
        key = blame.event or (blame.leaf.name if blame.leaf else "")
        if key not in seen:
            seen.append(key)
            yield blame
        if len(seen) >= MAX_BLAMES:
            return


def _goes_away(blame: Blame, trace: Trace, replayer: Replayer) -> bool:
    """Is the exception another, or none, when this value is finite?"""
    if blame.event is not None and blame.event.number >= 0:
        op, place = blame.event.op, user_place(blame.event.frames)

        def same_line(event: Event) -> Intervention | None:
            """It may run many times before the exception, as in a solver."""
            return zeroed if event.op == op and user_place(event.frames) == place else None

        error = replayer.traced(same_line, trace.micro_batch).error
    elif blame.leaf is not None and blame.leaf.kind == "batch":
        error = replayer.plain(window=[cast_bad_to_zero(batch) for batch in replayer.step.window]).error
    else:
        return blame.leaf is not None and blame.leaf.kind in ("parameter", "buffer")
    return error is None or (type(error), str(error)) != (type(trace.error), str(trace.error))


def _depends_on_samples(trace: Trace, replayer: Replayer) -> bool:
    """Do some parts of the batch pass, and others of the same size raise? If all pass, it is the size that is wrong."""
    batch: Any = replayer.step.window[trace.micro_batch]
    size = batch_size(batch)
    for num_parts in (2, 4, 8):
        if size < num_parts:
            break
        bounds = torch.linspace(0, size, num_parts + 1).long().tolist()
        parts = [list(range(low, high)) for low, high in itertools.pairwise(bounds)]
        passed = [replayer.plain(window=[select(batch, part, size)]).error is None for part in parts]
        if any(passed):
            return not all(passed)
    return False
