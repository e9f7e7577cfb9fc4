"""What is in a tensor: finite, infinite or NaN, and the statistics an incident shows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._private.autograd import PLAIN, unwrapped
from .._private.storage import sparse_values

FINITE, INF, NAN = 0, 1, 2
"""Kinds of tensors, in order of badness: a tensor with both Inf and NaN is NAN."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def numbers(tensor: Tensor) -> Tensor | None:
    """A dense real tensor with all the values of `tensor`; None when it has none that could be non-finite."""
    tensor = unwrapped(tensor).detach()
    if tensor.layout is torch.sparse_coo:
        tensor = sparse_values(tensor)
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.device.type == "meta" or tensor.is_quantized or tensor.numel() == 0:
        return None
    if type(tensor) not in PLAIN and not _has_memory(tensor):
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return None
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8


def _has_memory(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except Exception:  # an opaque subclass: cannot be looked into from here
        return False


def kind_of(tensor: Tensor) -> int:
    values = numbers(tensor)
    if values is None:
        return FINITE
    # A finite sum has only finite terms, and is the cheapest pass over the values. An infinite one may be mere overflow.
    if math.isfinite(values.sum().item()):
        return FINITE
    low, high = (bound.item() for bound in torch.aminmax(values))
    if low != low:
        return NAN
    return INF if math.isinf(low) or math.isinf(high) else FINITE


def is_mask(tensor: Tensor) -> bool:
    """-inf among zeros: an additive mask. A spectrogram with log(0) in it has other values too."""
    values = numbers(tensor)
    if kind_of(tensor) != INF or values is None or bool((values == math.inf).any()):
        return False
    return not bool(values[torch.isfinite(values)].any())


def kind_of_number(value: float) -> int:
    return NAN if value != value else INF if math.isinf(value) else FINITE


def bad_positions(tensor: Tensor) -> Tensor | None:
    """A boolean tensor of the same shape, true where a value is non-finite; None for tensors without a dense shape."""
    tensor = unwrapped(tensor).detach()
    if tensor.layout is not torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return ~torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)


def values_at(tensor: Tensor, positions: Tensor) -> Tensor | None:
    """The values at the marked positions of a result; None for an operand of another shape, which has none there."""
    try:
        return torch.broadcast_to(tensor, positions.shape)[positions]
    except RuntimeError:
        return None


def marked_rows(positions: Tensor) -> list[int]:
    """Indices of the first dimension under which any position is marked."""
    rows: list[int] = (
        positions.reshape(len(positions), -1).any(1).nonzero().flatten().tolist() if positions.numel() else []
    )
    return rows


def statistics(name: str, tensor: Tensor) -> dict[str, Any]:
    """As in `origin.inputs` of an incident. `smallest` is the smallest non-zero magnitude."""
    result: dict[str, Any] = {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    values = numbers(tensor)
    if values is None:
        if tensor.numel() and tensor.layout is torch.strided and tensor.dtype != torch.bool and not tensor.is_quantized:
            low, high = torch.aminmax(tensor.detach())
            result |= {"min": low.item(), "max": high.item()}
        return result
    finite = values[torch.isfinite(values)]
    result |= {
        "count": values.numel(),
        "zeros": int((values == 0).sum()),
        "negatives": int((values < 0).sum()),
        "nan": int(torch.isnan(values).sum()),
        "inf": int((values == math.inf).sum()),
        "neg_inf": int((values == -math.inf).sum()),
    }
    if finite.numel():
        result |= {"min": finite.min().item(), "max": finite.max().item()}
        magnitudes = finite.abs()
        magnitudes = magnitudes[magnitudes > 0]
        if magnitudes.numel():
            result["smallest"] = magnitudes.min().item()
    return result


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Bitwise equality, NaN equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())
