"""Reads some training data ahead: nothing is consumed, no worker process is started, no random number is drawn."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .._private.dataloader import in_this_process
from ..tensors.rng import undisturbed_rng
from .sources import ListSource, LoaderSource, MapSource, Source

MOST_SECONDS = 5.0


def read_ahead(source: Source, epoch: int, count: int) -> list[Any]:
    """Up to `count` batches from all over an epoch, where they can be chosen, or its first ones; as many as can be read within
    a few seconds. None of data that cannot be read without a trace, or that raises."""
    batches, begin = [], time.monotonic()
    with undisturbed_rng():
        state = source.state_dict()
        try:
            for batch in _batches(source, epoch, count):
                batches.append(batch)
                if time.monotonic() - begin > MOST_SECONDS:
                    break
        except Exception:
            return []
        finally:
            source.load_state_dict(state)
    return batches


def _batches(source: Source, epoch: int, count: int) -> Iterator[Any]:
    if source.unreadable is not None:
        return iter(())
    if isinstance(source, ListSource):
        return (source.data[place] for place in _spread(len(source.data), count))
    if isinstance(source, MapSource):
        return _of_map_data(source, epoch, count)
    if isinstance(source, LoaderSource) and not source.samplers_of_its_own():
        return itertools.islice(LoaderSource(in_this_process(source.data)).open(epoch, 0), count)
    return iter(())


def _of_map_data(source: MapSource, epoch: int, count: int) -> Iterator[Any]:
    sampler = copy.copy(source.sampler)
    sampler.epoch, sampler.base = epoch, 0
    for place in _spread(len(sampler), count):
        yield source.loader.collate_fn([source.data[index] for index in sampler.batch(place)])


def _spread(length: int, count: int) -> Sequence[int]:
    return range(0, length, max(1, length // count))[:count] if length else ()
