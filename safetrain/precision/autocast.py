"""The precisions by name, and a model or a batch in another floating-point type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.nest import map_tensors

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name of a precision: the type that autocast uses. fp32 is no autocast."""
LOW_PRECISION = (torch.float16, torch.bfloat16)


def cast_floats(nest: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None) -> Any:
    """The same nest with its floating-point tensors in another type; `only` those that are of these types."""

    def cast(item: Any) -> Any:
        if isinstance(item, Tensor) and item.is_floating_point() and (only is None or item.dtype in only):
            return item.to(dtype)
        return item

    return map_tensors(nest, cast)


@contextmanager
def autocast_disabled() -> Iterator[None]:
    """Every autocast context entered inside, also by the model's own code, does nothing."""
    kind = torch.autocast
    enter = kind.__enter__
    accelerator = torch.accelerator.current_accelerator()
    devices = {"cpu", *([accelerator.type] if accelerator is not None else [])}

    def enter_disabled(context: Any) -> Any:
        entered = enter(context)  # type: ignore[no-untyped-call]
        for device in devices:
            torch.set_autocast_enabled(device, False)
        return entered

    kind.__enter__ = enter_disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def model_as(
    models: list[nn.Module], dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None
) -> Iterator[None]:
    """Parameters and buffers in another type, autocast off. On leaving, the tensors themselves are back, without gradients."""
    tensors = [t for model in models for t in [*model.parameters(), *model.buffers()]]
    chosen = [t for t in tensors if t.is_floating_point() and (only is None or t.dtype in only)]
    saved = [(t, t.data) for t in chosen]
    default = torch.get_default_dtype()
    try:
        with autocast_disabled():
            for tensor, data in saved:
                tensor.data = data.to(dtype)
            if dtype == torch.float64:
                torch.set_default_dtype(dtype)
            yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data in saved:
            tensor.grad = None
            tensor.data = data
