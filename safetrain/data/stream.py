"""Training data as windows of micro-batches (one window per optimizer step), and the data cursor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..config.schema import DataConfig
from ..distributed.activity import STEP, Activity
from ..errors import CheckpointError, DataError
from ..tensors.nest import describe, is_flat, leaves, num_samples, to_device
from .distributed import PreshardedSource, ShardedSource, is_presharded
from .sources import RE_ITERABLE, MapSource, Source, open_source


class BatchStream:
    """Windows of micro-batches on the device, epoch after epoch.

    `epoch` and `num_consumed` (micro-batches of this epoch that were handed out) are the data cursor; batches that a
    loader has only prefetched do not count.
    """

    def __init__(self, source: Source, device: torch.device, what: str = "training data") -> None:
        self.source, self._device, self._what = source, device, what
        self._iterator: Iterator[Any] | None = None
        self.epoch = 0
        self.num_consumed = 0
        self.activity: Activity | None = None
        """Of the process, to mark when it waits for data."""
        self._unit, self._opened_at = STEP, 0

    def take(self, count: int) -> list[Any]:
        """The next `count` micro-batches; fewer at the end of an epoch, none when the epoch is over."""
        if self.activity is not None:
            self.activity.begin(self._unit, f"wait for {self._what}")
        window = [self._checked(batch) for batch in self._next(count)]
        if self.activity is not None:
            self.activity.at(self._unit)
        self.num_consumed += len(window)
        if not window and self.num_consumed == self.source.base == 0:
            raise DataError(self._nothing_left())
        return window

    def skip(self, count: int) -> None:
        """Skip the next `count` micro-batches of this epoch without training on them."""
        self.num_consumed += sum(1 for _ in self._next(count))

    def _next(self, count: int) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator, self._opened_at = self.source.open(self.epoch, self.num_consumed), self.num_consumed
        return itertools.islice(self._iterator, count)

    def watched_by(self, activity: Activity, unit: str) -> None:
        """Let it know when a batch is waited for. `unit`: what it is needed for."""
        self.activity, self._unit = activity, unit
        activity.samples_at[unit] = lambda index: self.source.ids(self._opened_at + index)

    def ids(self, window: Sequence[Any]) -> list[Sequence[int]] | None:
        """Sample indices of each micro-batch of the latest window; None if they are not known."""
        first = self.num_consumed - len(window)
        found = [self.source.ids(first + index) for index in range(len(window))]
        known = [
            ids for ids, batch in zip(found, window, strict=True) if ids is not None and len(ids) == num_samples(batch)
        ]
        return known if len(known) == len(window) else None

    def num_batches(self) -> int | None:
        """Micro-batches per epoch; None if that is not known beforehand."""
        return self.source.num_batches()

    def leave_out(self, ids: Iterable[int]) -> None:
        """Exclude these samples from the next epoch on."""
        self.source.leave_out(ids)

    def next_epoch(self) -> None:
        self._iterator = None
        self.epoch += 1
        self.num_consumed = self.source.base = 0

    def restart(self) -> None:
        """The epoch from its beginning."""
        self._iterator, self.num_consumed = None, 0

    def close(self) -> None:
        """Release the loader's worker processes."""
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """The data cursor, and what the source needs to resume there."""
        source = self.source
        return {
            "epoch": self.epoch,
            "num_consumed": self.num_consumed,
            "base": source.base,
            "unit": source.unit,
            "world_size": source.world_size,
            "source": source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also of a run with another number of processes: what all of them together have consumed of the epoch counts."""
        source, self._iterator = self.source, None
        if state["num_consumed"] and state.get("world_size") != source.world_size:
            raise CheckpointError(
                f"the training data gives each process its own shard, so a run of {state.get('world_size') or 1} processes cannot be "
                f"resumed by {source.world_size or 1} in the middle of an epoch.\n"
                "To fix: resume with the same number of processes; or let safetrain shard the data (pass the Dataset, or a "
                "DataLoader without DistributedSampler)."
            )
        self.epoch = state["epoch"]
        consumed = state.get("base", 0) + state["num_consumed"] * state.get("unit", source.unit)
        if consumed % source.unit == 0:
            source.base, self.num_consumed = 0, consumed // source.unit
        else:
            source.base, self.num_consumed = consumed, 0
        source.load_state_dict(state["source"])

    def caveats(self) -> list[str]:
        """What a resume cannot restore exactly, or restores slowly."""
        return self.source.caveats()

    def _checked(self, batch: Any) -> Any:
        if not is_flat(batch) and next(leaves(batch), None) is None:
            raise DataError(
                f"a batch contains no tensor (it is {describe(batch)}).\n"
                "To fix: let the dataset or its collate_fn return tensors, or objects with a .to(device) method."
            )
        return to_device(batch, self._device)

    def _nothing_left(self) -> str:
        if self.source.one_shot and self.epoch > 0:
            return (
                f"the {self._what} is a one-shot iterator that was exhausted after {self.epoch} epoch(s), before the run was "
                f"finished.\n{RE_ITERABLE}"
            )
        return (
            f"the {self._what} is empty: it gave no batch in epoch {self.epoch}.\nTo fix: check the path and length of the "
            "data set; with drop_last=True it must hold at least one full batch per process."
        )


def open_stream(
    data: Any,
    config: DataConfig,
    *,
    shuffle: bool,
    seed: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    what: str = "training data",
) -> BatchStream:
    """A stream over a DataLoader, a Dataset, any re-iterable of batches, or a function that returns an iterator.

    With several processes, each gets its shard of the batches.
    """
    if world_size > 1 and (config.sharded or is_presharded(data)):
        source: Source = PreshardedSource(open_source(data, config, shuffle=shuffle, seed=seed), world_size)
    else:
        source = open_source(data, config, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        if world_size > 1 and not isinstance(source, MapSource):
            source = ShardedSource(source, rank, world_size)
    return BatchStream(source, device, what)
