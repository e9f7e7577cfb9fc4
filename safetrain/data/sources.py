"""Kinds of training data, and how each one resumes in the middle of an epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..config.schema import DataConfig
from ..distributed.comm import gather
from ..errors import DataError
from ..tensors.rng import RandomState, undisturbed_rng
from .indices import LoaderIndices
from .kinds import check_kind
from .loaders import BATCHING, SAME_SETTINGS, batched, reading
from .sampler import ResumableBatchSampler
from .unreadable import Unreadable, open_collate

RE_ITERABLE = "To fix: pass a DataLoader, a Dataset, a list of batches, or a function that returns a new generator."
WORKERS = (
    "random numbers that the data set draws inside loader workers start over after a resume, because the workers do. "
    "If it draws any, seed them per sample (from its index and the epoch) to make a resume exact."
)


class Source:
    """Batches of one epoch after another. `position` is the number of batches of the epoch that were handed out before."""

    one_shot = False
    unit = 1
    """How much of the data (batches, or samples where their indices are known) all processes consume per position."""
    base = 0
    """How much of the epoch was consumed before position 0; not 0 only after a resume with another `unit`."""
    why_no_ids = (
        "batches that are given as they are have no index in a data set; pass a Dataset, or a DataLoader over one"
    )
    """What to say where `ids` does not know the samples."""
    follows: Sequence[str] = ()
    """The options of the config's `data` that have an effect on it."""
    unreadable: Unreadable | None = None
    """Samples whose reading raises are left out by this."""
    world_size: int | None = None
    """For data that is already sharded: the number of processes. Only as many can resume in the middle of an epoch."""

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        raise NotImplementedError

    def num_batches(self) -> int | None:
        """Batches per epoch; None if that is not known beforehand."""
        return None

    def ids(self, position: int) -> Sequence[int] | None:
        """Sample indices of the batch at that position of the current epoch; None if they are not known."""
        return None

    def leave_out(self, ids: Iterable[int]) -> None:
        """Exclude these samples from the next epoch on. Only called with indices that `ids` returned."""

    def state_dict(self) -> dict[str, Any]:
        """What `open` needs in addition to epoch and position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def caveats(self) -> list[str]:
        """What a resume cannot restore exactly, or restores slowly."""
        return []


class MapSource(Source):
    """A map-style data set: any position is reached at once."""

    follows = (*BATCHING, "shuffle", "skip_unreadable")

    def __init__(self, data: Dataset[Any], config: DataConfig, shuffle: bool, seed: int, rank: int, world_size: int):
        self.data, self._seed = data, seed
        self.sampler = ResumableBatchSampler(
            _length(data), config.batch_size, seed, shuffle, config.drop_last, rank, world_size
        )
        self.unit = self.sampler.unit
        # A generator of its own: creating an iterator must not draw from the random state that the model uses.
        self._generator = torch.Generator()
        collate = open_collate(config.collate_fn)
        self.unreadable = Unreadable(data, collate) if config.skip_unreadable else None
        self.loader = DataLoader(
            data if self.unreadable is None else self.unreadable.samples,  # type: ignore[arg-type]
            batch_sampler=self.sampler,
            num_workers=config.num_workers,
            generator=self._generator,
            collate_fn=collate if self.unreadable is None else self.unreadable.collate,
        )
        self._left_out_next: set[int] = set()

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        if position == 0 and self.base == 0:
            self._begin_epoch()
        self.sampler.epoch, self.sampler.base, self.sampler.start = epoch, self.base, position
        self._generator.manual_seed((self._seed + epoch) % 2**63)  # the seeds of the workers
        return iter(self.loader) if self.unreadable is None else self.unreadable.readable(iter(self.loader), self)

    def _begin_epoch(self) -> None:
        """All processes shard the same permutation, so a sample that one of them excludes is excluded on all."""
        if self.sampler.world_size > 1:
            known = gather((self.sampler.length, sorted(self._left_out_next)))
            if len({length for length, _ in known}) > 1:
                raise DataError(
                    f"the processes have data sets of different lengths: {', '.join(str(length) for length, _ in known)}.\n"
                    "To fix: give every process the whole data set, which is then sharded; if each process already has its "
                    "own part, pass a DataLoader and set data.sharded=true."
                )
            self._left_out_next.update(index for _, indices in known for index in indices)
        self.sampler.left_out = frozenset(self._left_out_next)

    def num_batches(self) -> int | None:
        return len(self.loader)

    def ids(self, position: int) -> Sequence[int] | None:
        ids = self.sampler.batch(position)
        return ids if self.unreadable is None else self.unreadable.read_of(ids)

    def leave_out(self, ids: Iterable[int]) -> None:
        self._left_out_next.update(ids)

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": sorted(self.sampler.left_out), "left_out_next": sorted(self._left_out_next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.left_out = frozenset(state.get("left_out", ()))
        self._left_out_next = set(state.get("left_out_next", ()))

    def caveats(self) -> list[str]:
        return [WORKERS] if self.loader.num_workers else []


class ListSource(Source):
    """A list of batches: any position is reached at once."""

    why_no_ids = ""  # its rows are what is named

    def __init__(self, data: Sequence[Any]) -> None:
        self.data = data

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        return (self.data[index] for index in range(position, len(self.data)))

    def num_batches(self) -> int | None:
        return len(self.data)


class IterableSource(Source):
    """Anything that yields its batches in order: a position is reached by reading up to it.

    The random state at the start of the epoch is restored first, so that a shuffle gives the same order again.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.one_shot = isinstance(data, Iterator)
        if isinstance(data, DataLoader):
            self.why_no_ids = (
                "samples of an IterableDataset have no index; those of a Dataset with __getitem__ have one"
            )
        self._at_start: dict[str, Any] | None = None

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        with self._random_state_of_epoch(epoch, position):
            return self._open_at(position)

    @contextmanager
    def _random_state_of_epoch(self, epoch: int, position: int) -> Iterator[None]:
        """Inside, random numbers are those that were drawn when this epoch began."""
        _set_epoch(self.data, epoch)
        if position == 0:
            self._at_start = {"global": RandomState.capture().to_plain(), "own": self._own_random_state()}
            yield
            return
        with undisturbed_rng():
            if self._at_start is not None:
                RandomState.from_plain(self._at_start["global"]).restore()
                self._restore_own(self._at_start["own"])
            yield

    def _open_at(self, position: int) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.data if hasattr(self.data, "__iter__") else self.data())
        return _skip(batches, position)

    def _own_random_state(self) -> list[torch.Tensor | None]:
        return [None if generator is None else generator.get_state() for generator in self._generators()]

    def _restore_own(self, states: list[torch.Tensor | None]) -> None:
        for generator, saved in zip(self._generators(), states, strict=False):
            if generator is not None and saved is not None:
                generator.set_state(saved)

    def _generators(self) -> list[torch.Generator | None]:
        return [getattr(owner, "generator", None) for owner in (self.data, *_samplers(self.data))]

    def state_dict(self) -> dict[str, Any]:
        return {"at_start": self._at_start, "own": self._own_random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at_start = state["at_start"]
        self._restore_own(state["own"])

    def caveats(self) -> list[str]:
        slow = (
            f"training data of type {type(self.data).__name__} can only be read from its beginning: a resume in the middle of an "
            "epoch reads up to where it was, and is exact if the data comes in the same order each time."
        )
        return [slow, *([WORKERS] if getattr(self.data, "num_workers", 0) else [])]


class LoaderSource(IterableSource):
    """A DataLoader over a map-style data set: a position is reached by drawing indices only, without loading samples."""

    data: DataLoader[Any]

    def __init__(self, data: DataLoader[Any], skip_unreadable: bool = False) -> None:
        self.drop_last, self.follows = data.drop_last, ("skip_unreadable",) if data.batch_sampler is not None else ()
        self.unreadable = Unreadable(data.dataset, data.collate_fn) if skip_unreadable else None
        super().__init__(data if self.unreadable is None else reading(data, self.unreadable))
        self._own_indices = LoaderIndices(self.data)

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        self._own_indices.begin(position)
        batches = super().open(epoch, position)
        return batches if self.unreadable is None else self.unreadable.readable(batches, self)

    def open_shard(
        self, epoch: int, first: int, shard: Callable[[Iterator[Any]], Iterator[Any]], position: int
    ) -> Iterator[Any]:
        """Like `open` at position `first`, but loads only what `shard` selects of the indices from there on: its batches are
        counted from `position`."""
        self._own_indices.begin(first)
        with self._random_state_of_epoch(epoch, first):
            indices = self._indices(first)
        batches = self._load(self._own_indices.recorded(shard(indices), position))
        return batches if self.unreadable is None else self.unreadable.readable(batches, self)

    def ids(self, position: int) -> Sequence[int] | None:
        ids = self._own_indices.at(position)
        return ids if self.unreadable is None or ids is None else self.unreadable.read_of(ids)

    def leave_out(self, ids: Iterable[int]) -> None:
        self._own_indices.leave_out(ids)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._own_indices.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._own_indices.load_state_dict(state)

    def num_batches(self) -> int | None:
        try:
            return len(self.data)
        except TypeError:  # a sampler without a length
            return None

    def _open_at(self, position: int) -> Iterator[Any]:
        if position:
            return self._load(self._own_indices.recorded(self._indices(position), position))
        return iter(self.data if self._own_indices.loader is None else self._own_indices.loader)

    def _indices(self, position: int) -> Iterator[Any]:
        """What the sampler yields from that position on."""
        loader = self.data
        # DataLoader's iterator draws its base seed first; the sampler may draw its own seed after it.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return _skip(
            self._own_indices.kept(loader.sampler if loader.batch_sampler is None else loader.batch_sampler), position
        )

    def _load(self, indices: Iterator[Any]) -> Iterator[Any]:
        loader = self.data
        sampler = _IteratorSampler(indices)
        batching: dict[str, Any] = (
            {"batch_size": None, "sampler": sampler} if loader.batch_sampler is None else {"batch_sampler": sampler}
        )
        same = {name: getattr(loader, name) for name in SAME_SETTINGS}
        return iter(DataLoader(loader.dataset, generator=torch.Generator(), **same, **batching))

    def samplers_of_its_own(self) -> list[Any]:
        """Those that are not torch's, and may have a state that is not known."""
        samplers = [sampler for sampler in _samplers(self.data) if sampler is not None]
        return [sampler for sampler in samplers if not type(sampler).__module__.startswith("torch.")]

    def caveats(self) -> list[str]:
        order = [
            f"a resume is exact if the order that {type(sampler).__name__} gives depends only on its set_epoch and on the global random state."
            for sampler in self.samplers_of_its_own()
        ]
        return [*order, *([WORKERS] if self.data.num_workers else [])]


class _IteratorSampler(Sampler[Any]):
    """Yields the rest of an iterator of indices."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


class StatefulSource(Source):
    """Data that keeps its own position (`state_dict`, `load_state_dict`), like StatefulDataLoader: its next iterator continues there."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        if position == 0:
            _set_epoch(self.data, epoch)
            return iter(self.data)
        with undisturbed_rng():
            return iter(self.data)

    def state_dict(self) -> dict[str, Any]:
        with undisturbed_rng():  # it may have to create an iterator first
            return {"loader": self.data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state["loader"])


def open_source(
    data: Any, config: DataConfig, *, shuffle: bool, seed: int, rank: int = 0, world_size: int = 1
) -> Source:
    """For a DataLoader, a Dataset, any re-iterable of batches, or a function that returns an iterator.

    With several processes a map-style Dataset is sharded; a source of other data still yields all of it on each process.
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return MapSource(data, config, shuffle, seed, rank, world_size)
    if isinstance(data, IterableDataset):
        source = open_source(batched(data, config), config, shuffle=shuffle, seed=seed)
        source.follows = BATCHING
        return source
    if _is_map_style(data):
        return MapSource(data, config, shuffle, seed, rank, world_size)
    if _is_stateful(data) and hasattr(data, "__iter__"):
        return StatefulSource(data)
    check_kind(data)
    if isinstance(data, (list, tuple)):
        return ListSource(data)
    # One that is derived from it (torch_geometric's, say) is read by its indices, too, unless it makes its batches itself.
    if (
        isinstance(data, DataLoader)
        and type(data).__iter__ is DataLoader.__iter__
        and not isinstance(data.dataset, IterableDataset)
    ):
        return LoaderSource(data, config.skip_unreadable and data.batch_sampler is not None)
    if hasattr(data, "__iter__") or (callable(data) and not inspect.isclass(data)):
        return IterableSource(data)
    raise DataError(f"cannot train on data of type {type(data).__name__}: it is not iterable.\n{RE_ITERABLE}")


def _is_map_style(data: Any) -> bool:
    """A data set that is not derived from torch's Dataset: it has samples by index, and what iterating over it would give, if it
    can be iterated over at all, are samples too."""
    kind = type(data)
    if not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")) or isinstance(data, (list, tuple, Mapping, str)):
        return False
    return hasattr(kind, "__getitems__") or not hasattr(kind, "__iter__")


def _is_stateful(data: Any) -> bool:
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _samplers(data: Any) -> list[Any]:
    return [getattr(data, name, None) for name in ("sampler", "batch_sampler")]


def _set_epoch(data: Any, epoch: int) -> None:
    for owner in (*_samplers(data), data):
        if set_epoch := getattr(owner, "set_epoch", None):
            set_epoch(epoch)


def _skip(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(iterator, None)
    return iterator


def _length(data: Dataset[Any]) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"the data set {type(data).__name__} has no length.\n"
            "To fix: define __len__, or derive it from torch.utils.data.IterableDataset."
        ) from error
