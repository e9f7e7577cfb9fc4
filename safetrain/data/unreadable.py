"""Samples whose reading raises: left out and named instead of ending the run, if the config says so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import default_collate

from ..config.targets import import_target, instantiate
from ..config.tree import TARGET
from ..errors import DataError

MOST = 0.05
"""Share of the samples read that may be unreadable; with more, something is wrong with the data set and not with its samples."""
FEWEST = 20
"""Unreadable samples that are no accident, however few were read."""


def open_collate(node: Mapping[str, Any] | None) -> Callable[[list[Any]], Any] | None:
    """The function that a config's `data.collate_fn` names, which loader workers can be sent; None without one."""
    if node is None:
        return None
    found = import_target(str(node.get(TARGET)))
    if inspect.isclass(found):
        return instantiate(node)  # type: ignore[no-any-return]
    arguments = {key: value for key, value in node.items() if key != TARGET}
    return functools.partial(found, **arguments) if arguments else found


@dataclass(frozen=True)
class _Unread:
    index: int
    reason: str


@dataclass(frozen=True)
class _Batch:
    value: Any
    """None if no sample of it could be read."""
    unread: Sequence[_Unread]
    num_asked: int


class _Samples:
    """The data set, with an `_Unread` for each sample that raises. Sent to loader workers."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._data[index]
        except Exception as error:
            return _Unread(index, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class _Collate:
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> _Batch:
        read = [sample for sample in samples if not isinstance(sample, _Unread)]
        unread = [sample for sample in samples if isinstance(sample, _Unread)]
        return _Batch(self.collate(read) if read else None, unread, len(samples))


class Leaving(Protocol):
    """Where samples can be left out of later epochs."""

    def leave_out(self, ids: Sequence[int]) -> None: ...


class Unreadable:
    """Reads around samples that raise, and counts them."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.samples, self.collate = _Samples(data), _Collate(collate or default_collate)
        self.known: dict[int, str] = {}
        """Reasons by the index of the sample."""
        self.found: Callable[[int, str], None] = lambda index, reason: None
        """Called for each new one."""
        self._num_asked = 0

    def read_of(self, ids: Iterable[int]) -> list[int]:
        return [index for index in ids if index not in self.known]

    def readable(self, batches: Iterator[_Batch], source: Leaving) -> Iterator[Any]:
        for batch in batches:
            self._num_asked += batch.num_asked
            for sample in batch.unread:
                if sample.index not in self.known:
                    self.known[sample.index] = sample.reason
                    source.leave_out([sample.index])
                    self.found(sample.index, sample.reason)
            if batch.value is None or (len(self.known) >= FEWEST and len(self.known) > MOST * self._num_asked):
                index, reason = next(reversed(self.known.items()))
                raise DataError(
                    f"{len(self.known)} of {self._num_asked} samples could not be read; the last is sample {index}: {reason}.\n"
                    "To fix: check the paths and the files of the data set. A few such samples are left out (data.skip_unreadable)."
                )
            yield batch.value
