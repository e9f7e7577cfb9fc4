"""The order in which samples are visited, and by which rank: a batch sampler that can start anywhere in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor
from torch.utils.data import Sampler


class ResumableBatchSampler(Sampler[list[int]]):
    """Batches of indices of a permutation that depends on seed and epoch only, so an epoch can be resumed anywhere.

    With n processes each takes every n-th batch, so they visit in one step what one process visits in n. The remainder
    of an epoch (less than n full batches) is divided evenly; it is dropped if it is less than one sample per process,
    or with `drop_last`.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.base = 0
        """Samples of the epoch visited before the first batch; not 0 only after a resume with another `unit`."""
        self.start = 0
        """The batch of this process that the next iteration starts with."""
        self.left_out: Set[int] = frozenset()
        """Indices that are excluded."""
        self._order: Sequence[int] | Tensor = ()
        self._order_of: tuple[int, Set[int]] | None = None

    @property
    def unit(self) -> int:
        """Samples per global batch: of all processes together."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        left = max(self.length - len(self.left_out) - self.base, 0)
        full, tail = divmod(left, self.unit)
        return full + (tail >= self.world_size and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        for position in range(self.start, len(self)):
            yield self.batch(position)

    def batch(self, position: int) -> list[int]:
        """This process's batch at that position of the epoch; empty past the end."""
        order, first = self.order(), self.base + position * self.unit
        if position >= len(self):
            return []
        tail = len(order) - first
        if tail >= self.unit:
            begin, end = self.rank * self.batch_size, (self.rank + 1) * self.batch_size
        else:
            begin, end = (tail * share // self.world_size for share in (self.rank, self.rank + 1))
        chosen = order[first + begin : first + end]
        return chosen.tolist() if isinstance(chosen, Tensor) else list(chosen)

    def order(self) -> Sequence[int] | Tensor:
        """All indices of this epoch, for all processes."""
        if not (self.shuffle or self.left_out):
            return range(self.length)
        if self._order_of != (self.epoch, self.left_out):
            indices = torch.arange(self.length)
            if self.shuffle:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
                indices = torch.randperm(self.length, generator=generator)
            if self.left_out:
                visited = torch.ones(self.length, dtype=torch.bool)
                visited[list(self.left_out)] = False
                indices = indices[visited[indices]]
            self._order, self._order_of = indices, (self.epoch, self.left_out)
        return self._order
