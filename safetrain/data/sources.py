"""Kinds of training data, and how each is entered in the middle of an epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..config.schema import DataConfig
from ..distributed.comm import gather
from ..errors import DataError
from ..tensors.rng import RandomState, undisturbed_rng
from .sampler import EpochBatches

RE_ITERABLE = "To fix: pass a DataLoader, a Dataset, a list of batches, or a function that returns a new generator."
WORKERS = (
    "random numbers drawn by the data set inside loader workers start anew after a resume, because the workers do. "
    "If it draws any, seed them per sample (from its index and the epoch) to make a resume exact."
)


class Source:
    """Batches of one epoch after another. `position` counts batches of the epoch that were handed out before."""

    one_shot = False
    unit = 1
    """How much of the data (batches, or samples where their indices are known) all processes consume per position."""
    base = 0
    """As much of the epoch was consumed before position 0; not 0 only after a resume with another `unit`."""
    world_size: int | None = None
    """Processes that the data was shared out for by itself: it can be entered in the middle by as many only."""

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        raise NotImplementedError

    def num_batches(self) -> int | None:
        """Of one epoch; None if that is not known beforehand."""
        return None

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
        self._seed, self._num_workers = seed, config.num_workers
        self._batches = EpochBatches(
            _length(data), config.batch_size, seed, shuffle, config.drop_last, rank, world_size
        )
        self.unit = self._batches.unit
        # Its own generator: making an iterator must not draw from the random state that the model uses.
        self._generator = torch.Generator()
        self._loader = DataLoader(
            data, batch_sampler=self._batches, num_workers=config.num_workers, generator=self._generator
        )
        self._left_out_next: set[int] = set()

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        if position == 0 and self.base == 0:
            self._begin_epoch()
        self._batches.epoch, self._batches.base, self._batches.start = epoch, self.base, position
        self._generator.manual_seed((self._seed + epoch) % 2**63)  # the seeds of the workers
        return iter(self._loader)

    def _begin_epoch(self) -> None:
        """What one process leaves out, all do: they share out the same permutation."""
        if self._batches.world_size > 1:
            known = gather((self._batches.length, sorted(self._left_out_next)))
            if len({length for length, _ in known}) > 1:
                raise DataError(
                    f"the processes have data sets of different lengths: {', '.join(str(length) for length, _ in known)}.\n"
                    "To fix: give every process the whole data set; each takes its part of it by itself. If each has its own "
                    "part already, pass a DataLoader and set data.sharded=true."
                )
            self._left_out_next.update(index for _, indices in known for index in indices)
        self._batches.left_out = frozenset(self._left_out_next)

    def num_batches(self) -> int | None:
        return len(self._loader)

    def ids(self, position: int) -> Sequence[int] | None:
        return self._batches.batch(position)

    def leave_out(self, ids: Iterable[int]) -> None:
        self._left_out_next.update(ids)

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": sorted(self._batches.left_out), "left_out_next": sorted(self._left_out_next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.left_out = frozenset(state.get("left_out", ()))
        self._left_out_next = set(state.get("left_out_next", ()))

    def caveats(self) -> list[str]:
        return [WORKERS] if self._num_workers else []


class Listed(Source):
    """A list of batches: any position is entered at once."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        return (self._batches[index] for index in range(position, len(self._batches)))

    def num_batches(self) -> int | None:
        return len(self._batches)


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

    @property
    def drops_last(self) -> bool:
        return self._loader.drop_last

    def open_part(self, epoch: int, position: int, deal: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """As `open`, but of the indices from that position on only what `deal` picks is loaded."""
        _set_epoch(self._data, epoch)
        if position == 0:
            self._at_start = {"global": RandomState.capture().to_plain(), "own": self._own_random_state()}
            return self._load(deal(self._indices(0)))
        with undisturbed_rng():
            if self._at_start is not None:
                RandomState.from_plain(self._at_start["global"]).restore()
                self._restore_own(self._at_start["own"])
            indices = self._indices(position)
        return self._load(deal(indices))

    def num_batches(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:  # a sampler without a length
            return None

    def _enter(self, position: int) -> Iterator[Any]:
        return self._load(self._indices(position))

    def _indices(self, position: int) -> Iterator[Any]:
        """What the sampler gives from that position on."""
        loader = self._loader
        # As an iterator of the loader does when it is made; the sampler may draw its seed from what comes next.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        indices = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        for _ in range(position):
            next(indices, None)
        return indices

    def _load(self, indices: Iterator[Any]) -> Iterator[Any]:
        loader = self._loader
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


def open_source(
    data: Any, config: DataConfig, *, shuffle: bool, seed: int, rank: int = 0, world_size: int = 1
) -> Source:
    """For a DataLoader, a Dataset, any re-iterable of batches, or a function that returns an iterator.

    With several processes a Dataset is shared out among them; other data is whole on each.
    """
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
    return source


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
