"""Values of tensors, remembered so that they can be put back."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from .._private import foreach
from .sharded import local


class Copies:
    """Values of tensors, in memory that is kept from one step to the next. Of a sharded one, this process's part."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.value_of: dict[int, Tensor] = {}
        """The value of each tensor by its id."""
        self._shapes: list[torch.Size] = []
        self._plain: list[Tensor] = []
        self._values: list[Tensor] = []
        self._odd: list[Tensor] = []

    @property
    def has_odd(self) -> bool:
        """Some cannot be written to in place: they are sparse, or several of their elements share memory."""
        return bool(self._odd)

    def take(self, tensors: list[Tensor]) -> bool:
        """Remember the values. True if these are not the tensors of the last time."""
        is_new = not (self.are(tensors) and [tensor.shape for tensor in tensors] == self._shapes)
        if is_new:
            self._arrange(tensors)
        foreach.copy_(self._values, self._plain)
        for tensor in self._odd:
            self.value_of[id(tensor)] = tensor.detach().clone()
        return is_new

    def are(self, tensors: list[Tensor]) -> bool:
        """Whether these are the tensors that are remembered."""
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))

    def _arrange(self, tensors: list[Tensor]) -> None:
        """Memory that fits is used again."""
        spare: dict[Any, list[Tensor]] = {}
        for value in self._values:
            spare.setdefault(layout_of(value), []).append(value)
        self.tensors = tensors
        self._shapes = [tensor.shape for tensor in tensors]
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        self._plain = [local(tensor.detach()) for tensor in unique if _is_plain(tensor)]
        self._odd = [tensor for tensor in unique if not _is_plain(tensor)]
        self._values = [
            spare[key].pop() if spare.get(key := layout_of(tensor)) else torch.empty_like(tensor)
            for tensor in self._plain
        ]
        plain = [tensor for tensor in unique if _is_plain(tensor)]
        self.value_of = {id(tensor): value for tensor, value in zip(plain, self._values, strict=True)}
        self.value_of |= {id(tensor): tensor for tensor in self._odd}

    def add(self, tensors: list[Tensor], values: list[Tensor | None]) -> None:
        """More tensors to remember; their values if they are known, else those of now."""
        known = {key: value.clone() for key, value in self.value_of.items()}  # their memory is shared out anew
        self._arrange([*self.tensors, *tensors])
        for tensor in self.tensors:
            given = known.get(id(tensor))
            self.value_of[id(tensor)].copy_(local(tensor.detach()) if given is None else given)
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                self.value_of[id(tensor)].copy_(value)

    def put_back(self) -> dict[int, Tensor]:
        """Give the tensors their values again. Returns what to put in the place of those that cannot be written to."""
        foreach.copy_(self._plain, self._values)
        return {id(tensor): self.value_of[id(tensor)] for tensor in self._odd}


def layout_of(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.layout)


def _is_plain(tensor: Tensor) -> bool:
    tensor = local(tensor)
    return tensor.layout is torch.strided and not overlaps_itself(tensor)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether it was expanded: several of its elements are one place in memory, which cannot be written to as a whole."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
