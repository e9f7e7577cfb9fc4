"""Weights that are not trained, in one file that all checkpoints and snapshots of a run link to, as long as their bits stay the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..tensors.checksum import checksums


@dataclass(frozen=True)
class _Place:
    path: Path
    sums: dict[str, int]
    about: dict[str, Any]
    """Size and checksum of the file."""


class FrozenFile:
    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._new_sums: dict[str, int] = {}

    def link(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Put the same file there; its size and checksum. None: these are other weights, or the file system has no links."""
        self._new_sums = _sums(tensors)
        return next((p.about for p in reversed(self._places) if p.sums == self._new_sums and _is_linked(p, path)), None)

    def written_to(self, path: Path, about: dict[str, Any]) -> None:
        """What `link` was called with last is in this file."""
        self._remember(_Place(path, self._new_sums, about))

    def loaded_from(self, path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
        self._remember(_Place(path, _sums(tensors), about))

    def _remember(self, place: _Place) -> None:
        self._places = [*(known for known in self._places if known.path.exists()), place]


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return dict(zip(tensors, checksums(list(tensors.values())), strict=True))


def _is_linked(place: _Place, path: Path) -> bool:
    try:
        os.link(place.path, path)
        is_whole = bool(path.stat().st_size == place.about["bytes"])
    except (OSError, NotImplementedError):
        return False
    if not is_whole:
        path.unlink()
    return is_whole
