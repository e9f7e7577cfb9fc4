"""A DataLoader without its worker processes."""

from __future__ import annotations

import copy
from typing import Any

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


def in_this_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader without worker processes: they take seconds to start."""
    return _changed(loader) if IN_THIS_PROCESS.works else loader


def _changed(loader: DataLoader[Any]) -> DataLoader[Any]:
    alone = copy.copy(loader)
    alone.__dict__.update(num_workers=0, persistent_workers=False, prefetch_factor=None, timeout=0, _iterator=None)
    alone.__dict__["_DataLoader__multiprocessing_context"] = None
    return alone
