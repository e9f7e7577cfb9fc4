"""Builds DataLoaders around the user's data: for iterable data, and for data with unreadable samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..config.schema import DataConfig
from .unreadable import Unreadable, open_collate

BATCHING = ("batch_size", "drop_last", "num_workers", "collate_fn")
"""The options of a config's `data` by which samples become batches."""
SAME_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    "prefetch_factor",
)
"""What a DataLoader that loads other indices of a data set has of the first one."""


def reading(loader: DataLoader[Any], unreadable: Unreadable) -> DataLoader[Any]:
    """The same loader, without the samples that cannot be read. Its samplers draw the same random numbers."""
    same = {name: getattr(loader, name) for name in (*SAME_SETTINGS, "generator", "persistent_workers")}
    same |= {"collate_fn": unreadable.collate, "batch_sampler": loader.batch_sampler}
    return DataLoader(unreadable.samples, **same)  # type: ignore[arg-type]


def batched(data: IterableDataset[Any], config: DataConfig) -> Any:
    """Batches of a data set that yields samples."""
    generator = torch.Generator() if callable(getattr(data, "state_dict", None)) and not config.num_workers else None
    loader = DataLoader(
        data,
        batch_size=config.batch_size,
        drop_last=config.drop_last,
        num_workers=config.num_workers,
        collate_fn=open_collate(config.collate_fn),
        generator=generator,
    )
    return loader if generator is None else Batches(data, loader)


class Batches:
    """Batches of a data set that keeps its own position. Nothing is prefetched, so that is the position of the batches, too."""

    def __init__(self, data: Any, loader: DataLoader[Any]) -> None:
        self.data, self._loader = data, loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        if set_epoch := getattr(self.data, "set_epoch", None):
            set_epoch(epoch)

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.data.load_state_dict(state)
