"""Reads training data without affecting the run that follows: no worker processes, no position moved, nothing
consumed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._private.dataloader import in_this_process
from ..data.sampler import ResumableBatchSampler
from ..data.sources import IterableSource, ListSource, LoaderSource, MapSource, Source, StatefulSource
from ..data.stream import BatchStream
from ..tensors.nest import describe, leaves, num_samples, to_device
from .outcome import Unavailable

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer


MOST = 50_000
"""Batches that are ever looked at, of data that has more."""


@dataclass(frozen=True)
class Read:
    """A batch on the device, and which samples it holds."""

    batch: Any
    position: int
    """In the first epoch, counted from 0."""
    ids: Sequence[int] | None
    """Indices in the data set, where it has any."""

    @property
    def size(self) -> int:
        return num_samples(self.batch)

    def name(self, row: int) -> str:
        """What to call a row: its index in the data set, or its place."""
        if self.ids is not None and row < len(self.ids):
            return str(self.ids[row])
        return f"row {row} of batch {self.position}"


class CannotRead(Exception):
    """The data set raised; `where` says at which samples."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(f"{where}: {type(error).__name__}: {error}")
        self.where, self.error = where, error


class Sample:
    """The batches of the first epoch: the first and the last of them, then others from all over the data.

    Data without indices is read in its order. What cannot be read without using it up raises Unavailable.
    """

    def __init__(self, trainer: SafeTrainer, stream: BatchStream | None = None) -> None:
        """`stream`: of other data than what is trained on."""
        self._original, self._model = (trainer.stream if stream is None else stream).source, trainer.model
        self._device = trainer.machine.device
        self._epoch: ResumableBatchSampler | None = None
        source = self.source()
        self.num_samples, self.num_batches = _num_samples(source), source.num_batches()

    def source(self) -> Source:
        """To be read from the beginning, once."""
        return _readable(self._original, self._model)

    def batches(self, in_order: bool = False, before: Sequence[int] = ()) -> Iterator[Read]:
        """`in_order`: as the run takes them. Otherwise those at the positions `before` come first, where they can be chosen."""
        source = self.source()
        count = self.num_batches or 0
        places = range(count) if in_order else list(dict.fromkeys([*before, *_spread(count)]))
        batches: Iterator[tuple[int, Sequence[int] | None, Any]]
        if isinstance(source, MapSource):
            batches = self._of_map_data(source, places)
        elif isinstance(source, ListSource):
            batches = ((place, None, source.data[place]) for place in places)
        else:
            batches = _one_after_another(source)
        place, ids = -1, None
        while True:
            try:
                place, ids, batch = next(batches)
            except StopIteration:
                return
            except CannotRead:
                raise
            except Exception as error:
                raise CannotRead(f"batch {place + 1}", error) from error
            yield Read(self._checked(place, batch), place, ids)

    def _of_map_data(self, source: MapSource, places: Sequence[int]) -> Iterator[tuple[int, Sequence[int], Any]]:
        if self._epoch is None:  # its permutation takes a while to make for large data
            self._epoch = copy.copy(source.sampler)
            self._epoch.epoch = self._epoch.base = 0
        batches = self._epoch
        dataset, collate = source.data, source.loader.collate_fn
        for place in places:
            ids = batches.batch(place)
            samples = list(_samples(dataset, ids))
            try:
                batch = collate(samples)
            except Exception as error:
                raise CannotRead(f"samples {_spoken(ids)}, put into a batch", error) from error
            yield place, ids, batch

    def _checked(self, place: int, batch: Any) -> Any:
        if next(leaves(batch), None) is None:
            error = TypeError(f"it holds no tensor (it is {describe(batch)})")
            raise CannotRead(f"batch {place}", error)
        return to_device(batch, self._device)


def _one_after_another(source: Source) -> Iterator[tuple[int, None, Any]]:
    """Opened when the first batch is asked for: opening may raise, too."""
    for place, batch in enumerate(source.open(0, 0)):
        yield place, None, batch


def _samples(dataset: Any, ids: Sequence[int]) -> Iterator[Any]:
    if getattr(dataset, "__getitems__", None):  # some data sets read many at once, as a loader would have them do
        try:
            yield from dataset.__getitems__(list(ids))
        except Exception as error:
            raise CannotRead(f"samples {_spoken(ids)}", error) from error
        return
    for index in ids:
        try:
            yield dataset[index]
        except Exception as error:
            raise CannotRead(f"sample {index}", error) from error


def _spoken(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (", …" if len(ids) > 4 else "")


def _num_samples(source: Source) -> int | None:
    """Of the first epoch, where that is known."""
    if not isinstance(source, MapSource):
        return None
    batches = source.sampler
    return min(batches.length, len(batches) * batches.batch_size)


def _spread(count: int) -> list[int]:
    """All places: first those at the beginning, which a run starts with, then the last, then the others in a random order."""
    generator = torch.Generator().manual_seed(0)
    if count > MOST:
        rest = torch.randint(count, (MOST,), generator=generator).tolist()
    else:
        rest = torch.randperm(count, generator=generator).tolist()
    return list(dict.fromkeys([*range(min(4, count)), *([count - 1] if count else []), *rest]))


def _readable(source: Source, model: nn.Module) -> Source:
    """The source itself, or one like it that can be read without a trace."""
    if source.one_shot:
        raise Unavailable("the training data can be iterated over only once, and looking at it would use it up")
    if isinstance(source, StatefulSource):
        return _copied(source, model)
    if isinstance(source, LoaderSource):
        return LoaderSource(in_this_process(source.data))
    if isinstance(source, IterableSource) and type(source.data) is DataLoader:
        return IterableSource(in_this_process(source.data))
    return source


def _copied(source: StatefulSource, model: nn.Module) -> StatefulSource:
    """Data that knows its own position gives it up in a copy; what it shares with the model, a policy say, stays shared."""
    shared: dict[int, Any] = {id(module): module for module in model.modules()}
    dataset = getattr(source.data, "dataset", None)
    shared[id(dataset)] = dataset
    try:
        return StatefulSource(copy.deepcopy(source.data, shared))
    except Exception as error:
        raise Unavailable(
            f"{type(source.data).__name__} keeps a position of its own and cannot be copied ({type(error).__name__}: {error})"
        ) from error
