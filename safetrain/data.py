"""Training data as windows of micro-batches, and the cursor that says how far they have been consumed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from .batch import describe, leaves, to_device
from .config.schema import DataConfig
from .errors import DataError

RE_ITERABLE = "To fix: pass a DataLoader, a Dataset, a list of batches, or a function that returns a new generator."


class EpochSampler(Sampler[int]):
    """A permutation that depends on seed and epoch only, so any epoch can be entered anywhere without replaying others.

    With several processes each takes every n-th index; up to n - 1 samples, different ones each epoch, are left out.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.world_size

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            order = torch.randperm(self.length, generator=generator).tolist()
        else:
            order = list(range(self.length))
        yield from order[self.rank : len(self) * self.world_size : self.world_size]


class BatchStream:
    """Endless windows of micro-batches on the device, epoch after epoch.

    `epoch` and `num_consumed` (micro-batches of this epoch that were handed out) are the data cursor; loaders prefetch,
    so only what was handed out counts.
    """

    def __init__(self, epochs: Callable[[int], Iterable[Any]], device: torch.device, one_shot: bool = False) -> None:
        self._epochs, self._device, self._one_shot = epochs, device, one_shot
        self._iterator: Iterator[Any] | None = None
        self.epoch = 0
        self.num_consumed = 0

    def take(self, count: int) -> list[Any]:
        """The next `count` micro-batches; fewer at the end of an epoch, none when the epoch is over."""
        if self._iterator is None:
            self._iterator = iter(self._epochs(self.epoch))
            self.num_consumed = 0
        window = [self._checked(batch) for batch in itertools.islice(self._iterator, count)]
        self.num_consumed += len(window)
        if not window and self.num_consumed == 0:
            raise DataError(self._nothing_left())
        return window

    def next_epoch(self) -> None:
        self._iterator = None
        self.epoch += 1

    def close(self) -> None:
        """Let go of the loader's worker processes."""
        self._iterator = None

    def _checked(self, batch: Any) -> Any:
        if next(leaves(batch), None) is None:
            raise DataError(
                f"a batch contains no tensor (it is {describe(batch)}).\n"
                "To fix: let the dataset or its collate_fn return tensors, or objects with a .to(device) method."
            )
        return to_device(batch, self._device)

    def _nothing_left(self) -> str:
        if self._one_shot and self.epoch > 0:
            return (
                f"the training data is a one-shot iterator that ran out after {self.epoch} pass, and the run is not "
                f"finished.\n{RE_ITERABLE}"
            )
        return (
            "the training data is empty: it gave no batch in epoch "
            f"{self.epoch}.\nTo fix: check the path and length of the data set; with drop_last=True the data must hold at "
            "least one full batch per process."
        )


def open_stream(
    data: Any, config: DataConfig, *, shuffle: bool, seed: int, device: torch.device, rank: int = 0, world_size: int = 1
) -> BatchStream:
    """A stream over a DataLoader, a Dataset, any re-iterable of batches, or a function that returns an iterator."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        sampler = EpochSampler(_length(data), seed, shuffle, rank, world_size)
        data = DataLoader(
            data,
            batch_size=config.batch_size,
            sampler=sampler,
            drop_last=config.drop_last and shuffle,
            num_workers=config.num_workers,
            # Its own generator: making an iterator must not draw from the random state that the model uses.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        world_size = 1  # the sampler has shared out the samples already
    elif isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=config.batch_size, num_workers=config.num_workers)

    if isinstance(data, DataLoader) or hasattr(data, "__iter__"):
        one_shot = isinstance(data, Iterator)

        def epochs(epoch: int) -> Iterable[Any]:
            for sampler in (getattr(data, "sampler", None), getattr(data, "batch_sampler", None), data):
                if set_epoch := getattr(sampler, "set_epoch", None):
                    set_epoch(epoch)
            return _share(data, rank, world_size)

        return BatchStream(epochs, device, one_shot)
    if callable(data) and not inspect.isclass(data):
        return BatchStream(lambda epoch: _share(data(), rank, world_size), device)
    raise DataError(f"cannot train on data of type {type(data).__name__}: it is not iterable.\n{RE_ITERABLE}")


def _length(data: Dataset[Any]) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"the data set {type(data).__name__} has no length.\n"
            "To fix: define __len__, or derive it from torch.utils.data.IterableDataset."
        ) from error


def _share(batches: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """This process's part: every n-th batch, and the same number of batches on every process."""
    if world_size == 1:
        return batches
    return (group[rank] for group in _full_groups(batches, world_size))


def _full_groups(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(batches)
    while len(group := list(itertools.islice(iterator, size))) == size:
        yield group
