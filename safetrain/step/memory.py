"""A step that runs out of device memory: tried once more after freeing cached memory, then as two half batches if that
is allowed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core.numbers import gibibytes
from ..forensics.samples_of import select
from ..tensors.devices import free_cached_memory, memory
from ..tensors.nest import num_samples
from .measurement import Measurement
from .step import Step

_MESSAGE = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Not every device has an exception of its own for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and _MESSAGE.search(str(error)) is not None


def attempt(step: Step, window: Sequence[Any], on_shortage: str, warn: Callable[[str], None]) -> Measurement:
    """`Step.attempt`; out of memory, once more without what was cached or kept by frames of the first attempt. `on_shortage`: what
    then, `stop` or `halves`. The window that was attempted in the end is `measurement.window`."""
    try:
        return step.attempt(window)
    except Exception as error:
        if step.exchange.world_size > 1 or not is_out_of_memory(error):
            raise
        first = _released(error)
    # Not inside `except`: there, the frames of the failed attempt, and all that they hold, are still alive.
    attempts = [("once more", list(window))]
    if on_shortage == "halves" and any(num_samples(batch) > 1 for batch in window):
        attempts.append(("in halves", [half for batch in window for half in _halves(batch)]))
    for how, smaller in attempts:
        step.transaction.rewind()
        step.clear_gradients()
        free_cached_memory(step.device)
        warn(f"step {step.index} ran out of memory ({first}); it is tried {how}")
        try:
            return step.attempt(smaller)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            first = _released(error)
    step.transaction.restore()
    step.clear_gradients()
    raise torch.OutOfMemoryError(_message(step, window, first))


def _released(error: BaseException) -> str:
    """Its first line; the frames that it came through let go of their tensors."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__context__
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _halves(batch: Any) -> list[Any]:
    size = num_samples(batch)
    if size < 2:
        return [batch]
    middle = size // 2
    return [select(batch, list(rows), size) for rows in (range(middle), range(middle, size))]


def _message(step: Step, window: Sequence[Any], first: str) -> str:
    held = memory(step.device)
    sizes = sorted({num_samples(batch) for batch in window})
    facts = [f"batches of {' or '.join(map(str, sizes))} samples, {len(window)} per step"]
    facts += [f"{name} {gibibytes(held[name])}" for name in ("used", "peak", "reserved", "total") if name in held]
    if held.get("reserved", 0) > 1.2 * held.get("used", 0) > 0:
        facts.append("the difference of reserved and used is fragmentation")
    return (
        f"step {step.index} does not fit into the memory of {step.device}: {first} ({', '.join(facts)}).\n"
        "To fix: a smaller data.batch_size with more loop.grad_accum gives the same update; loop.precision=bf16 halves activations; "
        "loop.on_out_of_memory=halves splits such a step; activation checkpointing, or loop.strategy=fsdp on several devices."
    )
