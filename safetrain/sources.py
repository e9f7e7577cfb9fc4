"""Kinds of training data, and how each is entered in the middle of an epoch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from .config.schema import DataConfig
from .errors import DataError
from .rng import RandomState, undisturbed_rng

RE_ITERABLE = "To fix: pass a DataLoader, a Dataset, a list of batches, or a function that returns a new generator."
WORKERS = (
    "random numbers drawn by the data set inside loader workers start anew after a resume, because the workers do. "
    "If it draws any, seed them per sample (from its index and the epoch) to make a resume exact."
)


class EpochSampler(Sampler[int]):
    """A permutation that depends on seed and epoch only, so any epoch can be entered anywhere without replaying others.

    With several processes each takes every n-th index; up to n - 1 samples, different ones each epoch, are left out.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, rank: int = 0, world_size: int = 1) -> None:
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.start = 0
        """How many of this process's indices the next iteration leaves out at its beginning."""
        self.left_out: Set[int] = frozenset()
        """Indices that are not visited."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return (self.length - len(self.left_out)) // self.world_size

    def __iter__(self) -> Iterator[int]:
        yield from self.between(self.start, len(self))

    def between(self, start: int, end: int) -> Sequence[int]:
        """This process's indices of this epoch from the `start`-th up to the `end`-th."""
        span = slice(self.rank + start * self.world_size, min(end, len(self)) * self.world_size, self.world_size)
        if not (self.shuffle or self.left_out):
            return range(self.length)[span]
        indices = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            indices = torch.randperm(self.length, generator=generator)
        if self.left_out:
            visited = torch.ones(self.length, dtype=torch.bool)
            visited[list(self.left_out)] = False
            indices = indices[visited[indices]]
        numbers: list[int] = indices[span].tolist()
        return numbers


class Source:
    """Batches of one epoch after another. `position` counts batches of the epoch that were handed out before."""

    one_shot = False

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        raise NotImplementedError

    def ids(self, position: int) -> Sequence[int] | None:
        """Which samples the batch at that position of the epoch that is open consists of; None if that is not known."""
        return None

    def leave_out(self, ids: Iterable[int]) -> None:
        """Do without these samples from the next epoch on. Only asked for ids that were given."""

    def state_dict(self) -> dict[str, Any]:
        """What `open` needs beside epoch and position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def caveats(self) -> list[str]:
        """What a resume cannot restore exactly, or does slowly."""
        return []


class MapData(Source):
    """A data set with indices: any position is entered at once."""

    def __init__(self, data: Dataset[Any], config: DataConfig, shuffle: bool, seed: int, rank: int, world_size: int):
        self._seed, self._batch_size, self._num_workers = seed, config.batch_size, config.num_workers
        self._sampler = EpochSampler(_length(data), seed, shuffle, rank, world_size)
        # Its own generator: making an iterator must not draw from the random state that the model uses.
        self._generator = torch.Generator()
        self._loader = DataLoader(
            data,
            batch_size=config.batch_size,
            sampler=self._sampler,
            drop_last=config.drop_last,
            num_workers=config.num_workers,
            generator=self._generator,
        )
        self._left_out_next: set[int] = set()

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        if position == 0:
            self._sampler.left_out = frozenset(self._left_out_next)
        self._sampler.set_epoch(epoch)
        self._sampler.start = position * self._batch_size
        self._generator.manual_seed((self._seed + epoch) % 2**63)  # the seeds of the workers
        return iter(self._loader)

    def ids(self, position: int) -> Sequence[int] | None:
        # Several processes would each know of their own samples only, and share out the data in different ways.
        if self._sampler.world_size > 1:
            return None
        return self._sampler.between(position * self._batch_size, (position + 1) * self._batch_size)

    def leave_out(self, ids: Iterable[int]) -> None:
        self._left_out_next.update(ids)

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": sorted(self._sampler.left_out), "left_out_next": sorted(self._left_out_next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.left_out = frozenset(state.get("left_out", ()))
        self._left_out_next = set(state.get("left_out_next", ()))

    def caveats(self) -> list[str]:
        return [WORKERS] if self._num_workers else []


class Listed(Source):
    """A list of batches: any position is entered at once."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        return (self._batches[index] for index in range(position, len(self._batches)))


class Iterated(Source):
    """Anything that gives its batches in order: a position is reached by reading up to it.

    Random numbers drawn when an epoch begins (a shuffle, say) are drawn again from the state they were drawn from then.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.one_shot = isinstance(data, Iterator)
        self._at_start: dict[str, Any] | None = None

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        _set_epoch(self._data, epoch)
        if position == 0:
            self._at_start = {"global": RandomState.capture().to_plain(), "own": self._own_random_state()}
            return iter(self._iterable())
        with undisturbed_rng():
            if self._at_start is not None:
                RandomState.from_plain(self._at_start["global"]).restore()
                self._restore_own(self._at_start["own"])
            return self._enter(position)

    def _enter(self, position: int) -> Iterator[Any]:
        batches = iter(self._iterable())
        for _ in range(position):
            next(batches, None)
        return batches

    def _iterable(self) -> Iterable[Any]:
        iterable: Iterable[Any] = self._data if hasattr(self._data, "__iter__") else self._data()
        return iterable

    def _own_random_state(self) -> list[torch.Tensor | None]:
        return [None if generator is None else generator.get_state() for generator in self._generators()]

    def _restore_own(self, states: list[torch.Tensor | None]) -> None:
        for generator, saved in zip(self._generators(), states, strict=False):
            if generator is not None and saved is not None:
                generator.set_state(saved)

    def _generators(self) -> list[torch.Generator | None]:
        samplers = [getattr(self._data, name, None) for name in ("sampler", "batch_sampler")]
        return [getattr(owner, "generator", None) for owner in (self._data, *samplers)]

    def state_dict(self) -> dict[str, Any]:
        return {"at_start": self._at_start, "own": self._own_random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at_start = state["at_start"]
        self._restore_own(state["own"])

    def caveats(self) -> list[str]:
        slow = (
            f"training data of type {type(self._data).__name__} can only be read from its beginning: a resume in the middle of an "
            "epoch reads up to where it was, and is exact if the data comes in the same order each time."
        )
        return [slow, *([WORKERS] if getattr(self._data, "num_workers", 0) else [])]


class Loader(Iterated):
    """A DataLoader over data with indices: a position is entered by drawing indices only, nothing is loaded."""

    def __init__(self, data: DataLoader[Any]) -> None:
        super().__init__(data)
        self._loader = data

    def _enter(self, position: int) -> Iterator[Any]:
        loader = self._loader
        # As an iterator of the loader does when it is made; the sampler may draw its seed from what comes next.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        indices = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        for _ in range(position):
            next(indices, None)
        batching: dict[str, Any] = (
            {"batch_size": None, "sampler": _Rest(indices)}
            if loader.batch_sampler is None
            else {"batch_sampler": _Rest(indices)}
        )
        return iter(
            DataLoader(
                loader.dataset,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                prefetch_factor=loader.prefetch_factor,
                generator=torch.Generator(),
                **batching,
            )
        )

    def caveats(self) -> list[str]:
        samplers = [self._loader.sampler, self._loader.batch_sampler]
        unknown = [type(s).__name__ for s in samplers if s is not None and not type(s).__module__.startswith("torch.")]
        order = [
            f"a resume is exact if the order that {name} gives depends only on its set_epoch and on the global random state."
            for name in unknown
        ]
        return [*order, *([WORKERS] if self._loader.num_workers else [])]


class _Rest(Sampler[Any]):
    """What an iterator of indices still has."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


class Stateful(Source):
    """Data that knows its own position (`state_dict`, `load_state_dict`): its next iterator goes on from there."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        if position == 0:
            _set_epoch(self._data, epoch)
            return iter(self._data)
        with undisturbed_rng():
            return iter(self._data)

    def state_dict(self) -> dict[str, Any]:
        with undisturbed_rng():  # it may have to make an iterator first
            return {"loader": self._data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._data.load_state_dict(state["loader"])


class Shared(Source):
    """One process's part: every n-th batch, and the same number of batches on every process."""

    def __init__(self, whole: Source, rank: int, world_size: int) -> None:
        self._whole, self._rank, self._world_size = whole, rank, world_size
        self.one_shot = whole.one_shot

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        batches = self._whole.open(epoch, position * self._world_size)
        while len(group := list(itertools.islice(batches, self._world_size))) == self._world_size:
            yield group[self._rank]

    def state_dict(self) -> dict[str, Any]:
        return self._whole.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._whole.load_state_dict(state)

    def caveats(self) -> list[str]:
        return self._whole.caveats()


def open_source(
    data: Any, config: DataConfig, *, shuffle: bool, seed: int, rank: int = 0, world_size: int = 1
) -> Source:
    """For a DataLoader, a Dataset, any re-iterable of batches, or a function that returns an iterator."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return MapData(data, config, shuffle, seed, rank, world_size)
    if isinstance(data, IterableDataset) and not _is_stateful(data):
        data = DataLoader(
            data, batch_size=config.batch_size, drop_last=config.drop_last, num_workers=config.num_workers
        )
    source: Source
    if _is_stateful(data) and hasattr(data, "__iter__"):
        source = Stateful(data)
    elif isinstance(data, (list, tuple)):
        source = Listed(data)
    elif type(data) is DataLoader and not isinstance(data.dataset, IterableDataset):
        source = Loader(data)
    elif hasattr(data, "__iter__") or (callable(data) and not inspect.isclass(data)):
        source = Iterated(data)
    else:
        raise DataError(f"cannot train on data of type {type(data).__name__}: it is not iterable.\n{RE_ITERABLE}")
    return source if world_size == 1 else Shared(source, rank, world_size)


def _is_stateful(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _set_epoch(data: Any, epoch: int) -> None:
    for owner in (getattr(data, "sampler", None), getattr(data, "batch_sampler", None), data):
        if set_epoch := getattr(owner, "set_epoch", None):
            set_epoch(epoch)


def _length(data: Dataset[Any]) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"the data set {type(data).__name__} has no length.\n"
            "To fix: define __len__, or derive it from torch.utils.data.IterableDataset."
        ) from error
