"""Training data without indices, or with an order of its own, shared out among several processes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import DistributedSampler

from ..distributed.comm import gather, of_first
from ..tensors.nest import tensors_in
from ..tensors.rng import RandomState
from .sources import Loader, Source


class Shared(Source):
    """One process's part: every n-th batch, and the same number of batches on every process.

    All processes read the same batches in the same order: what the data draws at random comes from a stream of its own,
    which is the same on all of them. Of a DataLoader over data with indices each process loads its own part only, and what
    is left at the end of an epoch is dealt out sample by sample; of other data up to n - 1 batches are left out there.
    """

    def __init__(self, whole: Source, rank: int, world_size: int) -> None:
        self._whole, self._rank, self.unit = whole, rank, world_size
        self.one_shot = whole.one_shot
        self._random: RandomState | None = None
        """Of the data."""

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        first = self.base + position * self.unit
        is_new = self._random is None
        if self._random is None:
            self._random = RandomState.from_plain(of_first(RandomState.capture().to_plain()))
        with self._random_of_data():
            if isinstance(self._whole, Loader):
                return self._whole.open_part(epoch, first, lambda indices: self._deal(indices, is_new))
            batches = self._whole.open(epoch, first)
        return self._deal(batches, is_new)

    def _deal(self, batches: Iterator[Any], is_new: bool) -> Iterator[Any]:
        while True:
            with self._random_of_data():
                group = list(itertools.islice(batches, self.unit))
            if is_new and group:
                _warn_of_different(group)
                is_new = False
            if len(group) < self.unit:
                break
            yield group[self._rank]
        if isinstance(self._whole, Loader) and not self._whole.drops_last and all(isinstance(g, list) for g in group):
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

    def num_batches(self) -> int | None:
        return None if (count := self._whole.num_batches()) is None else count // self.unit

    def state_dict(self) -> dict[str, Any]:
        return {**self._whole.state_dict(), "random": None if self._random is None else self._random.to_plain()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also of a run in one process, where the data drew from the random stream that the model uses."""
        self._whole.load_state_dict(state)
        if (random := state.get("random")) is not None:
            self._random = RandomState.from_plain(random)

    def caveats(self) -> list[str]:
        return self._whole.caveats()


class OwnShare(Source):
    """Data that gives each process its own part. The epoch ends for all when it ends for one."""

    def __init__(self, part: Source, world_size: int) -> None:
        self._part, self.one_shot = part, part.one_shot
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


def has_own_share(data: Any) -> bool:
    """A loader that was made for several processes."""
    samplers = [getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _warn_of_different(group: list[Any]) -> None:
    """Parts of different wholes may overlap, or leave something out."""
    if len(set(gather(_digest(group)))) > 1:
        logging.getLogger("safetrain").warning(
            "%s",
            "the processes do not see the same training data, so the parts that they take may overlap or leave samples out. "
            "To fix: make the data in the same way on all processes (seed it); or, if it gives each process its own part "
            "already, set data.sharded=true.",
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
