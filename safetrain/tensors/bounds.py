"""Checks on the host that indices and labels are in range, before a device uses them.

On the CPU an index out of range is an exception. On a GPU it is an assertion inside a kernel, after which the process cannot use the
device any more: nothing can be saved from it. Batches come from the host, where looking at them costs no wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..core.numbers import listed
from .devices import is_host
from .nest import named_tensors
from .originals import original_of

_UNCHECKED = nullcontext()


class OutOfRange(IndexError):
    """An index or a label that would have ended the device."""

    def __init__(self, message: str, function: str, micro_batch: int, field: str, rows: list[int]) -> None:
        super().__init__(message)
        self.function, self.micro_batch, self.field, self.rows = function, micro_batch, field, rows


class Bounds:
    """Inside `checked`, functions of `torch.nn.functional` that use an index look at it first. Compiled code does not."""

    def __init__(self, device: torch.device) -> None:
        self._is_on = not is_host(device)
        self.reads_device = False
        """Also look at indices that did not come from the host as they are. Each costs a wait, so only attempts at a repair do."""
        self._window: Sequence[Any] = ()

    @contextmanager
    def thorough(self) -> Iterator[None]:
        self.reads_device = True
        try:
            yield
        finally:
            self.reads_device = False

    def checked(self, window: Sequence[Any]) -> AbstractContextManager[None]:
        return self._watching(window) if self._is_on else _UNCHECKED

    @contextmanager
    def _watching(self, window: Sequence[Any]) -> Iterator[None]:
        self._window = window
        before = {name: getattr(functional, name) for name in _CHECKS}
        try:
            for name, function in before.items():
                setattr(functional, name, self._checking(name, function))
            yield
        finally:
            self._window = ()
            for name, function in before.items():
                setattr(functional, name, function)

    def _checking(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                used = _CHECKS[name](*args, **kwargs)
                if used is not None:
                    self._check(name, *used)
            return function(*args, **kwargs)

        return checked

    def _check(self, name: str, index: Any, size: int, ignored: int | None) -> None:
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or is_host(index.device):
            return
        known = original_of(index)
        if known is None and not (self.reads_device and index.numel()):
            return
        values = index.detach() if known is None else known[2]
        bad = _outside(values, size, ignored)
        if bad is not None:
            value = int(values[bad].reshape(-1)[0])
            if known is None:
                raise OutOfRange(_message(name, value, size, "", []), name, 0, "", [])
            moved, original, _ = known
            rows = _rows(original, index, moved, bad)
            micro_batch, field = self._place(moved)
            raise OutOfRange(_message(name, value, size, field, rows), name, micro_batch, field, rows)

    def _place(self, moved: Tensor) -> tuple[int, str]:
        for number, batch in enumerate(self._window):
            for path, tensor in named_tensors(batch):
                if tensor is moved:
                    return number, path
        return 0, ""


def _embedding(input: Any, weight: Any, *_: Any, **__: Any) -> tuple[Any, int, int | None] | None:
    return (input, weight.shape[0], None) if isinstance(weight, Tensor) else None


def _class_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, *_: Any, **__: Any
) -> tuple[Any, int, int | None] | None:
    if not isinstance(input, Tensor) or input.dim() == 0:
        return None
    return target, input.shape[0 if input.dim() == 1 else 1], ignore_index


_CHECKS: dict[str, Callable[..., tuple[Any, int, int | None] | None]] = {
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "cross_entropy": _class_loss,
    "nll_loss": _class_loss,
}


def _outside(values: Tensor, size: int, ignored: int | None) -> Tensor | None:
    """Where; None if nowhere."""
    low, high = torch.aminmax(values)
    if int(low) >= 0 and int(high) < size:
        return None  # nearly every batch
    bad = (values < 0) | (values >= size)
    if ignored is not None:
        bad &= values != ignored
    return bad if bool(bad.any()) else None


def _rows(original: Tensor, index: Tensor, moved: Tensor, bad: Tensor) -> list[int]:
    """Samples, counted along the first dimension of the field."""
    if not original.dim():
        return []
    shape = (-1, *[1] * (original.dim() - 1))
    numbers = torch.empty_strided(original.size(), original.stride(), dtype=torch.int64)
    numbers.copy_(torch.arange(original.shape[0]).reshape(shape).expand(original.shape))
    offset = index.storage_offset() - moved.storage_offset()
    of_view = torch.as_strided(numbers, index.size(), index.stride(), offset)
    found: list[int] = of_view[bad].tolist()
    return sorted(set(found))


def _message(name: str, value: int, size: int, field: str, rows: Sequence[int]) -> str:
    what = f"field {field!r} of the batch" if field else "an index that the step computes"
    where = f", row {listed(rows, 8)}" if rows else ""
    return f"index {value} is out of bounds: {what}{where} holds it, and {name} uses it on {size} entries"
