"""The same step at another precision: temporary casts of model, batch and single modules."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.nest import map_tensors


def cast_floats(value: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None) -> Any:
    def cast(item: Any) -> Any:
        if isinstance(item, Tensor) and item.is_floating_point() and (only is None or item.dtype in only):
            return item.to(dtype)
        return item

    return map_tensors(value, cast)


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
    """Parameters and buffers in another dtype, autocast off; the tensors themselves come back untouched."""
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


@contextmanager
def fp32_island(module: nn.Module) -> Iterator[None]:
    """This module runs without autocast, on inputs cast to float32."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    inner = module.forward
    own = module.__dict__.get("forward")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return inner(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))

    module.forward = types.MethodType(forward, module)
    try:
        yield
    finally:
        if own is not None:
            module.forward = own
        else:
            del module.forward
