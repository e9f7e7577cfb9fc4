"""Some elements of a tensor: their values, where they lie in memory, and how to name them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_POSITIONS = 1 << 16
"""Of a set of elements that is followed; of a larger one the first are."""


@dataclass(frozen=True)
class Kept:
    """A tensor as it was when an operation read or wrote it."""

    value: Tensor
    storage: int
    offset: int
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def addresses(self, positions: Tensor) -> Tensor:
        """Where in the storage these elements lie; positions count the elements in the order of their indices."""
        result = torch.full_like(positions, self.offset)
        for index, stride in zip(unravelled(positions, self.shape), self.strides, strict=True):
            result = result + index * stride
        return result

    def positions_at(self, addresses: Tensor) -> Tensor:
        """The positions of the elements that lie at these places; those that lie nowhere in this tensor are left out."""
        own = self.addresses(torch.arange(self.value.numel()))
        ordered, order = own.sort()
        found = torch.searchsorted(ordered, addresses).clamp_max(max(len(ordered) - 1, 0))
        return order[found][ordered[found] == addresses] if len(ordered) else addresses[:0]


@dataclass(frozen=True)
class Spot:
    """Elements of a tensor that is followed back."""

    name: str
    """Of the operand."""
    kept: Kept
    positions: Tensor
    note: str = ""

    @property
    def values(self) -> Tensor:
        return self.kept.value.reshape(-1)[self.positions]

    @property
    def index(self) -> str:
        return index_text(self.kept.shape, self.positions)

    @property
    def is_empty(self) -> bool:
        return self.kept.value.numel() == 0


def distinct(positions: Tensor) -> Tensor:
    return torch.unique(positions.reshape(-1))  # type: ignore[no-any-return]


def unravelled(positions: Tensor, shape: Sequence[int]) -> list[Tensor]:
    indices = []
    for size in reversed(shape):
        indices.append(positions % size)
        positions = positions // size
    return indices[::-1]


def ravelled(indices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    result = torch.zeros((), dtype=torch.long)
    for index, size in zip(indices, shape, strict=True):
        result = result * size + index
    return result


def everything(kept: Kept) -> Tensor:
    return torch.arange(min(kept.value.numel(), MAX_POSITIONS))


def rows_of(positions: Tensor, shape: Sequence[int]) -> list[int]:
    """Indices of the first dimension."""
    if not shape or not len(positions):
        return []
    return [int(row) for row in distinct(unravelled(positions, shape)[0])]


def index_text(shape: Sequence[int], positions: Tensor) -> str:
    """`[4, :]`, `[0:3, 7]`; nothing for all of a tensor."""
    total = math.prod(shape)
    if not shape or not len(positions) or len(positions) == total:
        return "[:]" if shape and len(positions) else ""
    parts, count = [], 1
    for index, size in zip(unravelled(positions, shape), shape, strict=True):
        chosen = [int(i) for i in distinct(index)]
        count *= len(chosen)
        parts.append(_dimension(chosen, size))
    if count != len(positions):  # not a rectangle
        first = ", ".join(str(int(index[0])) for index in unravelled(positions, shape))
        return f"[{first}] and {len(positions) - 1} more"
    while len(parts) > 1 and parts[-1] == ":" and len(parts) > 2:
        parts.pop()
        if parts[-1] != ":":
            parts.append("…" if len(shape) - len(parts) > 1 else ":")
            break
    return f"[{', '.join(parts)}]"


def _dimension(chosen: list[int], size: int) -> str:
    if len(chosen) == size and size > 1:
        return ":"
    if len(chosen) == 1:
        return str(chosen[0])
    if chosen[-1] - chosen[0] == len(chosen) - 1:
        return f"{chosen[0]}:{chosen[-1] + 1}"
    shown = ", ".join(map(str, chosen[:4]))
    return f"({shown}{', …' if len(chosen) > 4 else ''})"


def values_text(values: Tensor) -> str:
    """`= 0`, `: 32 values, all 0`, `: 33 values in [-1.2, 3.5]`, `: all False`."""
    count = values.numel()
    if count == 0:
        return ": empty"
    if values.is_complex():
        values = torch.view_as_real(values)
    if count == 1:
        return f" = {number_text(values.reshape(-1)[0].item())}"
    first = values.reshape(-1)[0]
    if bool((values == first).all()) or bool((values != values).all()):
        return f": {count} values, all {number_text(first.item())}"
    if values.dtype == torch.bool:
        return f": {int(values.sum())} of {count} are True"
    low, high = values.min().item(), values.max().item()
    return f": {count} values in [{number_text(low)}, {number_text(high)}]"


def number_text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.4g}"
    # 1.0000001 is outside of the domain of acos, and 1 is not.
    return f"{value:.9g}" if math.isfinite(value) and float(text) != value and float(text) == round(value) else text
