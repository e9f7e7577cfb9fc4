"""The indices that a DataLoader's batch sampler yields: which samples each batch holds, without those in quarantine."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from torch.utils.data import DataLoader, Sampler

from .._private.dataloader import sampling

MOST_REMEMBERED = 1024
"""Batches whose indices are remembered: more than one that is prefetched ever waits."""


class LoaderIndices:
    """Remembers the indices of the batches that were asked for lately, by their position, and leaves samples out."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batch_sampler: Any = loader.batch_sampler
        has_batches = loader.batch_sampler is not None and hasattr(loader.dataset, "__getitem__")
        self.loader = sampling(loader, _Recording(self)) if has_batches else None
        """The same loader, whose batches are remembered; None if that does not work."""
        self._ids: OrderedDict[int, array[int]] = OrderedDict()
        self._left_out: Set[int] = frozenset()
        self._left_out_next: set[int] = set()

    def begin(self, position: int) -> None:
        """An epoch is opened there."""
        self._ids.clear()
        if position == 0:
            self._left_out = frozenset(self._left_out_next)

    def at(self, position: int) -> Sequence[int] | None:
        return self._ids.get(position)

    def leave_out(self, ids: Iterable[int]) -> None:
        """From the next epoch on."""
        self._left_out_next.update(ids)

    def kept(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches of indices, without the samples that are left out."""
        for batch in batches:
            if not self._left_out or not isinstance(batch, list):
                yield batch
            elif kept := [index for index in batch if index not in self._left_out]:
                yield kept

    def recorded(self, batches: Iterable[Any], position: int = 0) -> Iterator[Any]:
        """The same batches of indices, remembered for `at`."""
        for place, batch in enumerate(batches, position):
            if isinstance(batch, list) and all(isinstance(index, int) for index in batch):
                self._ids[place] = array("q", batch)
                if len(self._ids) > MOST_REMEMBERED:
                    self._ids.popitem(last=False)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"left_out": sorted(self._left_out), "left_out_next": sorted(self._left_out_next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left_out, self._left_out_next = frozenset(state.get("left_out", ())), set(state.get("left_out_next", ()))


class _Recording(Sampler[Any]):
    """A loader's own batch sampler, whose batches are remembered."""

    def __init__(self, indices: LoaderIndices) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices.recorded(self._indices.kept(self._indices.batch_sampler))

    def __len__(self) -> int:
        return len(self._indices.batch_sampler)
