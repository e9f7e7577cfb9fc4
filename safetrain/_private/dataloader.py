"""Reads a DataLoader without its worker processes, and finds the worker that it waits for."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from .feature import Feature


def _probe() -> bool:
    data: Any = range(2)
    loader: DataLoader[Any] = DataLoader(
        data, num_workers=1, multiprocessing_context="spawn", generator=torch.Generator()
    )
    return [int(item) for item in _changed(loader)] == [0, 1]


IN_THIS_PROCESS = Feature(
    "loader_without_workers",
    relies_on="attributes of torch.utils.data.DataLoader that its constructor computes",
    lost="`safetrain check` reads the data of a DataLoader without starting its worker processes",
    instead="it starts them, which takes seconds",
    probe=_probe,
)


class WorkerWait(NamedTuple):
    worker: int
    pid: int
    batch: int
    """The number of the batch, counted from 0 by this iterator."""


def _probe_wait() -> bool:
    from torch.utils.data import dataloader

    names = dataloader._MultiProcessingDataLoaderIter.__init__.__code__.co_names
    return {"_rcvd_idx", "_task_info", "_workers"} <= {
        *names,
        *dataloader._MultiProcessingDataLoaderIter._reset.__code__.co_names,
    }


WAIT = Feature(
    "loader_wait",
    relies_on="torch.utils.data.dataloader._MultiProcessingDataLoaderIter: _rcvd_idx, _task_info, _workers",
    lost="of a step that hangs in its data loader: the worker process and the samples it waits for",
    instead="the stacks of this process only",
    probe=_probe_wait,
)


def waited_for(frames: Iterable[FrameType]) -> WorkerWait | None:
    """The worker that a thread with these frames waits for."""
    if not WAIT.works:
        return None
    from torch.utils.data import dataloader

    for frame in frames:
        if frame.f_code.co_filename != dataloader.__file__:
            continue  # asking any frame for its variables would keep them alive
        iterator = frame.f_locals.get("self")
        if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
            index = iterator._rcvd_idx
            if index not in iterator._task_info:  # nothing was asked for
                return None
            worker = iterator._task_info[index][0]
            return WorkerWait(worker, iterator._workers[worker].pid, index)
    return None


def in_this_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader without worker processes: they take seconds to start."""
    return _changed(loader) if IN_THIS_PROCESS.works else loader


def _probe_batch_sampler() -> bool:
    loader: DataLoader[Any] = DataLoader(list(range(4)), batch_size=2, generator=torch.Generator())  # type: ignore[arg-type]
    return [batch.tolist() for batch in _sampling(loader, [[3, 1], [0]])] == [[3, 1], [0]]


OTHER_BATCH_SAMPLER = Feature(
    "loader_indices",
    relies_on="attribute `batch_sampler` of torch.utils.data.DataLoader, replaced after its construction",
    lost="the indices in the data set of the samples of a DataLoader's batches: incidents name them, bad ones are left out later",
    instead="incidents name rows of the batch only",
    probe=_probe_batch_sampler,
)


def sampling(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any] | None:
    """The same loader with another batch sampler: it draws the same random numbers and seeds its workers alike. None if that does
    not work here."""
    return _sampling(loader, batch_sampler) if OTHER_BATCH_SAMPLER.works else None


def _sampling(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    other = copy.copy(loader)
    other.__dict__.update(batch_sampler=batch_sampler, _iterator=None)
    return other


def _changed(loader: DataLoader[Any]) -> DataLoader[Any]:
    alone = copy.copy(loader)
    alone.__dict__.update(num_workers=0, persistent_workers=False, prefetch_factor=None, timeout=0, _iterator=None)
    alone.__dict__["_DataLoader__multiprocessing_context"] = None
    return alone
