"""Captures the values of tensors and the contents of containers so that they can be restored."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._private import foreach
from .devices import is_host
from .rng import GENERATORS, restorer_of_generator
from .sharded import local

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


class SavedTensors:
    """Values of tensors, in memory that is used again from one step to the next. Of a sharded tensor, this process's part."""

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

    def capture(self, tensors: list[Tensor]) -> bool:
        """Copy the values. True if these are not the tensors of the last time."""
        is_new = not (self.are(tensors) and [tensor.shape for tensor in tensors] == self._shapes)
        if is_new:
            self._arrange(tensors)
        foreach.copy_(self._values, self._plain)
        for tensor in self._odd:
            self.value_of[id(tensor)] = tensor.detach().clone()
        return is_new

    def are(self, tensors: list[Tensor]) -> bool:
        """Whether these are the tensors whose values are held."""
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
        """More tensors; their values if they are known, else those of now."""
        known = {key: value.clone() for key, value in self.value_of.items()}  # `_arrange` reuses their memory
        self._arrange([*self.tensors, *tensors])
        for tensor in self.tensors:
            given = known.get(id(tensor))
            self.value_of[id(tensor)].copy_(local(tensor.detach()) if given is None else given)
        for tensor, value in zip(tensors, values, strict=True):
            if value is not None:
                self.value_of[id(tensor)].copy_(value)

    def restore(self) -> dict[int, Tensor]:
        """Give the tensors their values again. Returns what to put in the place of those that cannot be written to."""
        foreach.copy_(self._plain, self._values)
        return {id(tensor): self.value_of[id(tensor)] for tensor in self._odd}


def on_host(tensor: Tensor) -> Tensor:
    """A copy of the values that takes no memory of a device: training may have filled it."""
    return tensor.detach().clone() if is_host(tensor.device) else tensor.detach().cpu()


def layout_of(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.layout)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether it was expanded: several of its elements are one place in memory, which cannot be written to as a whole."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_plain(tensor: Tensor) -> bool:
    tensor = local(tensor)
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    return tensor.layout is torch.strided and not overlaps_itself(tensor)


def give_values(tensor: Tensor, values: Tensor) -> None:
    """Write them into a tensor of any kind: also one that was expanded, or made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:  # all of them are one place in memory
                tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        tensor.copy_(values)


class Captured:
    """What the roots hold: values of tensors, contents of containers, states of generators, all the way down.

    `restore` puts them back into the same objects, any number of times. Parameters and the
    objects in `known` are left out: their owner restores those.
    """

    left_alone: ClassVar[tuple[type, ...]] = (str, bytes, int, float, complex, bool, type(None))

    def __init__(self, roots: Iterable[Any], known: Iterable[Any] = (), max_items: int | None = None) -> None:
        self._max_items = max_items
        """Longer containers are data, not state."""
        self._restorers: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {id(item): item for item in known}
        todo = deque(roots)
        while todo and self.has_room:
            item = todo.popleft()
            if not isinstance(item, self.left_alone) and id(item) not in self._seen:
                self._seen[id(item)] = item  # also keeps it alive: the id must stay its own
                todo.extend(self.capture(item))

    @property
    def has_room(self) -> bool:
        return True

    def capture(self, item: Any) -> Iterable[Any]:
        """Keep what restores one object; returns what it holds."""
        if isinstance(item, GENERATORS):
            self._restorers.append(restorer_of_generator(item))
        elif isinstance(item, Tensor):
            if not isinstance(item, nn.Parameter) and is_state(item):
                self._restorers.append(partial(_copy, item.data, on_host(item)))
        elif type(item) in CONTAINERS and self._fits(item):
            self._restorers.append(restorer_of_container(item))
            return list(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, (tuple, frozenset)) and self._fits(item):
            return item
        return ()

    def _fits(self, container: Any) -> bool:
        return self._max_items is None or len(container) < self._max_items

    def restore(self) -> None:
        for restorer in self._restorers:
            restorer()


def _copy(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def is_state(tensor: Tensor) -> bool:
    """It has values of its own that can be written to: it is no result of a computation, and none of its elements share memory."""
    return tensor.grad_fn is None and not tensor.is_nested and _is_plain(tensor)


def restorer_of_container(container: Any) -> Callable[[], None]:
    content = _content(container)

    def restore() -> None:
        now = _content(container)
        if len(now) == len(content) and all(map(_is_same, now, content)):
            return
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(content)
        else:
            container.update(content)

    return restore


def _content(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other
