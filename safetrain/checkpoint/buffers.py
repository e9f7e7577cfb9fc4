"""Module buffers of every kind: read as plain numbers, and written back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..tensors.saved import give_values


def values_of(buffer: Tensor | None) -> Tensor:
    """A buffer as plain numbers: what is conjugated or negated only when it is read is read."""
    assert buffer is not None
    return buffer.detach().resolve_conj().resolve_neg()


def put_buffers(modules: Mapping[str, nn.Module], buffers: Mapping[str, Tensor], device: torch.device | None) -> None:
    for name, saved in buffers.items():
        path, _, key = name.rpartition(".")
        held = modules[path]._buffers
        current = held[key] if key in held else None  # noqa: SIM401  (of a scripted module it is no dict)
        if current is not None and current.shape == saved.shape and current.dtype == saved.dtype:
            give_values(current, saved)
        else:
            where = (saved.device if device is None else device) if current is None else current.device
            modules[path]._buffers[key] = saved.to(where, copy=True)


def check_dense(model: nn.Module) -> None:
    for name, module, key in buffers_of(model):
        buffer = module._buffers[key]
        assert buffer is not None
        if (kind := _not_dense(buffer)) is not None:
            instead = (
                "its parts as buffers and put them together" if kind == "sparse" else "plain tensors and convert them"
            )
            raise UsageError(
                f"the {kind} buffer {name} cannot be saved, and a run keeps copies of its state.\n"
                f"To fix: register {instead} in forward; or train without copies: "
                "checkpoint.enabled=false, checkpoint.save_final=false and checkpoint.snapshot_every=null."
            )


def _not_dense(buffer: Tensor) -> str | None:
    if buffer.is_nested:
        return "nested"
    if buffer.is_quantized:
        return "quantized"
    if buffer.is_mkldnn:
        return "mkldnn"
    return None if buffer.layout is torch.strided else "sparse"


def buffers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The full name, the module and the key of every buffer that holds a tensor."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}" if path else key, module, key
