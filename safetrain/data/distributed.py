"""Shards training data that is not a map-style Dataset: loaders, iterables, lists, and data that is already sharded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import DistributedSampler

from ..distributed.comm import gather, of_first
from ..tensors.nest import tensors_in
from ..tensors.rng import RandomState
from .sources import LoaderSource, Source


class ShardedSource(Source):
    """One process's shard: every n-th batch, and the same number of batches on every process.

    All processes iterate over the same batches in the same order: the data draws its random numbers from a state of its own,
    which is the same on all of them. With a DataLoader over a map-style Dataset each process loads its own shard only, and
    the samples left over at the end of an epoch are divided evenly; of other data up to n - 1 batches are dropped there.
    """

    def __init__(self, whole: Source, rank: int, world_size: int) -> None:
        self._whole, self._rank, self.unit = whole, rank, world_size
        self.one_shot, self.unreadable = whole.one_shot, whole.unreadable
        self._random: RandomState | None = None
        """The random state of the data, separate from the model's."""

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        first = self.base + position * self.unit
        is_new = self._random is None
        if self._random is None:
            self._random = RandomState.from_plain(of_first(RandomState.capture().to_plain()))
        with self._random_of_data():
            if isinstance(self._whole, LoaderSource):
                return self._whole.open_shard(epoch, first, lambda indices: self._shard(indices, is_new), position)
            batches = self._whole.open(epoch, first)
        return self._shard(batches, is_new)

    def _shard(self, batches: Iterator[Any], is_new: bool) -> Iterator[Any]:
        while True:
            with self._random_of_data():
                group = list(itertools.islice(batches, self.unit))
            if is_new and group:
                _warn_if_different(group)
                is_new = False
            if len(group) < self.unit:
                break
            yield group[self._rank]
        whole = self._whole
        if isinstance(whole, LoaderSource) and not whole.drop_last and all(isinstance(g, list) for g in group):
            samples = [index for batch in group for index in batch]
            if len(samples) >= self.unit:
                begin, end = (len(samples) * share // self.unit for share in (self._rank, self._rank + 1))
                yield samples[begin:end]

    @contextmanager
    def _random_of_data(self) -> Iterator[None]:
        outside = RandomState.capture()
        assert self._random is not None
        self._random.restore()
        try:
            yield
        finally:
            self._random = RandomState.capture()
            outside.restore()

    def ids(self, position: int) -> Sequence[int] | None:
        return self._whole.ids(position) if isinstance(self._whole, LoaderSource) else None

    def leave_out(self, ids: Iterable[int]) -> None:
        """The same on every process: all of them draw the same indices."""
        self._whole.leave_out(ids)

    def num_batches(self) -> int | None:
        return None if (count := self._whole.num_batches()) is None else count // self.unit

    def state_dict(self) -> dict[str, Any]:
        return {**self._whole.state_dict(), "random": None if self._random is None else self._random.to_plain()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state of a run in one process has no `random`: there the data drew from the random state of the model."""
        self._whole.load_state_dict(state)
        if (random := state.get("random")) is not None:
            self._random = RandomState.from_plain(random)

    def caveats(self) -> list[str]:
        return self._whole.caveats()


class PreshardedSource(Source):
    """Data that already gives each process its own shard. The epoch ends on all processes when it ends on one."""

    def __init__(self, part: Source, world_size: int) -> None:
        self._part, self.one_shot, self.unreadable = part, part.one_shot, part.unreadable
        self.world_size = world_size

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        batches, end = self._part.open(epoch, position), object()
        while True:
            batch = next(batches, end)
            if any(gather(batch is end)):
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._part.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._part.load_state_dict(state)

    def caveats(self) -> list[str]:
        return self._part.caveats()


def is_presharded(data: Any) -> bool:
    """Whether a DataLoader has a DistributedSampler."""
    samplers = [getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _warn_if_different(group: list[Any]) -> None:
    if len(set(gather(_digest(group)))) > 1:
        logging.getLogger("safetrain").warning(
            "%s",
            "the processes do not see the same training data, so their shards may overlap or leave samples out. "
            "To fix: create the data in the same way on all processes (seed it); or, if it already gives each process its own "
            "shard, set data.sharded=true.",
        )


def _digest(group: list[Any]) -> str:
    digest = xxhash.xxh3_128()
    for batch in group:
        tensors = list(tensors_in(batch))
        if not tensors:
            digest.update(repr(batch).encode())
        for tensor in tensors:
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(_content(tensor))
    return digest.hexdigest()


def _content(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
