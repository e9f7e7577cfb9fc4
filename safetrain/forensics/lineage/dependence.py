"""Which elements of its operands an element of an operation's result depends on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..schemas import base_name, schema_of
from .recording import Record
from .spots import MAX_POSITIONS, Kept, Spot, distinct, everything, ravelled, unravelled

LARGEST_JACOBIAN = 4_000_000
"""Operations over more values are not differentiated to find out what depends on what."""

REDUCTIONS = {
    "sum", "mean", "amax", "amin", "any", "all", "prod", "var", "std", "nansum", "linalg_vector_norm", "norm",
    "logsumexp", "var_mean", "std_mean", "max", "min", "argmax", "argmin", "count_nonzero", "median", "nanmedian",
}  # fmt: skip
ROWWISE = {"_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk"}
MOVING = {
    "cat", "stack", "index", "gather", "index_select", "embedding", "where", "masked_fill", "masked_fill_",
    "masked_scatter", "scatter", "index_put", "flip", "roll", "repeat", "constant_pad_nd", "take", "masked_select",
    "slice_scatter", "select_scatter", "tril", "triu", "index_put_", "scatter_", "index_copy", "expand_copy", "_unsafe_index",
}  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"}


def dependencies(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    """The elements of each operand that these elements of the output depend on. What is not known is taken to be all of it."""
    op = record.event.op
    base = op.rstrip("_") if op.rstrip("_") in MOVING else op
    for applies, find in _WAYS:
        if applies(record, base):
            try:
                return find(record, output, positions)
            except Exception:  # an overload with other arguments: the next way answers
                continue
    return [_aligned(name, kept, output, positions) for name, kept in record.operands.items()]


def _aligned(name: str, kept: Kept, output: Kept, positions: Tensor) -> Spot:
    """Nothing is known of the operation but that leading dimensions of the same size are its batch."""
    shared = 0
    for own, other in zip(kept.shape[:-1], output.shape, strict=False):
        if own != other:
            break
        shared += 1
    if not shared or not len(positions):
        return _whole(name, kept)
    mask = torch.zeros(kept.shape, dtype=torch.bool)
    mask[tuple(unravelled(positions, output.shape)[:shared])] = True
    return _marked(name, kept, mask)


def _whole(name: str, kept: Kept) -> Spot:
    return Spot(name, kept, everything(kept))


def _is_pointwise(record: Record, op: str) -> bool:
    if op in ("copy_", "_to_copy", "clone", "lift_fresh", "fill_", "nan_to_num", "detach", "contiguous", "alias"):
        return True
    return torch.Tag.pointwise in getattr(record.function, "tags", ()) and op not in MOVING


def _pointwise(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    found = []
    indices = unravelled(positions, output.shape)
    for name, kept in record.operands.items():
        if record.event.op == "copy_" and name == "self":
            continue
        if len(kept.shape) > len(output.shape):
            raise ValueError("not broadcast")
        aligned = indices[len(indices) - len(kept.shape) :] if kept.shape else []
        chosen = [
            index if size != 1 else torch.zeros_like(index) for index, size in zip(aligned, kept.shape, strict=True)
        ]
        own = ravelled(chosen, kept.shape).expand(len(positions)) if kept.shape else torch.zeros(1, dtype=torch.long)
        found.append(Spot(name, kept, distinct(own)))
    return found


def _argument(record: Record, name: str, default: Any = None) -> Any:
    names = schema_of(record.function).arguments
    if name in record.kwargs:
        return record.kwargs[name]
    return dict(zip(names, record.args, strict=False)).get(name, default)


def _first(record: Record) -> tuple[str, Kept]:
    return next(iter(record.operands.items()))


def _reduced_dims(record: Record, shape: tuple[int, ...]) -> set[int]:
    dims = _argument(record, "dim")
    if dims is None or dims == []:
        return set(range(len(shape)))
    return {dim % max(len(shape), 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}


def _reduction(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    name, kept = _first(record)
    dims = _reduced_dims(record, kept.shape)
    keeps = len(output.shape) == len(kept.shape)
    indices = iter(unravelled(positions, output.shape))
    mask = torch.zeros(kept.shape, dtype=torch.bool)
    selector: list[Any] = []
    for dim in range(len(kept.shape)):
        if dim in dims:
            selector.append(slice(None))
            if keeps:
                next(indices)
        else:
            selector.append(next(indices))
    mask[tuple(selector)] = True
    return [_marked(name, kept, mask)]


def _marked(name: str, kept: Kept, mask: Tensor) -> Spot:
    return Spot(name, kept, mask.reshape(-1).nonzero().flatten()[:MAX_POSITIONS])


def _rowwise(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    name, kept = _first(record)
    dim = _argument(record, "dim", -1) % max(len(kept.shape), 1)
    selector: list[Any] = list(unravelled(positions, output.shape))
    selector[dim] = slice(None)
    mask = torch.zeros(kept.shape, dtype=torch.bool)
    mask[tuple(selector)] = True
    return [_marked(name, kept, mask)]


def _moving(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    """Run on the numbers of the elements instead of their values, the operation says itself where each element came from."""
    numbered: dict[int, Tensor] = {}
    bounds: list[tuple[str, Kept, int]] = []
    start = 1
    steering = {"indices", "index", "mask", "condition"}
    for name, kept in record.operands.items():
        if base_name(name) in steering:
            continue
        count = kept.value.numel()
        numbered[id(kept.value)] = torch.arange(start, start + count, dtype=torch.float64).reshape(kept.shape)
        bounds.append((name, kept, start))
        start += count
    literal = "value" if "value" in schema_of(record.function).arguments else None

    def replaced(argument: str | None, item: Any) -> Any:
        if isinstance(item, Tensor):
            steers = argument in steering
            other = None if steers else numbered.get(id(item))
            return item.clone() if other is None else other.clone()
        if isinstance(item, (list, tuple)):
            return type(item)(replaced(argument, each) for each in item)
        return 0.0 if argument == literal and literal else item

    names = schema_of(record.function).arguments
    result = record.function(
        *(replaced(names[i] if i < len(names) else None, item) for i, item in enumerate(record.args)),
        **{
            key: replaced(key, item)
            for key, item in record.kwargs.items()
            if key not in ("dtype", "layout", "device", "pin_memory")
        },
    )
    sources = result.reshape(-1)[positions].long()
    found = []
    for name, kept, first in bounds:
        own = sources[(sources >= first) & (sources < first + kept.value.numel())] - first
        if len(own):
            found.append(Spot(name, kept, distinct(own)))
    steers = [
        Spot(name, kept, _steered(kept, output, positions))
        for name, kept in record.operands.items()
        if base_name(name) in steering
    ]
    return [*found, *steers]


def _steered(kept: Kept, output: Kept, positions: Tensor) -> Tensor:
    """The elements of an index or a mask that decide on these elements: by their place, where the shapes allow it."""
    indices = unravelled(positions, output.shape)
    if kept.shape and len(kept.shape) <= len(output.shape) and kept.shape == output.shape[: len(kept.shape)]:
        return distinct(ravelled(indices[: len(kept.shape)], kept.shape))
    if len(kept.shape) == len(output.shape) and all(a in (1, b) for a, b in zip(kept.shape, output.shape, strict=True)):
        chosen = [i if size != 1 else torch.zeros_like(i) for i, size in zip(indices, kept.shape, strict=True)]
        return distinct(ravelled(chosen, kept.shape))
    return everything(kept)


def _product(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    """Rows of the left and columns of the right factor; the summand at the place itself."""
    operands = list(record.operands.items())
    spots = []
    if len(operands) == 3:
        name, kept = operands.pop(0)
        spots += _pointwise_one(name, kept, output, positions)
    (left_name, left), (right_name, right) = operands
    indices = unravelled(positions, output.shape)
    row: list[Any] = [*indices[: len(left.shape) - 1], slice(None)]
    left_mask = torch.zeros(left.shape, dtype=torch.bool)
    left_mask[tuple(row)] = True
    right_mask = torch.zeros(right.shape, dtype=torch.bool)
    if len(right.shape) == 1:
        right_mask[:] = True
    else:
        batch: list[Any] = list(indices[: len(right.shape) - 2])
        right_mask[(*batch, slice(None), indices[-1])] = True
    return [_marked(left_name, left, left_mask), _marked(right_name, right, right_mask), *spots]


def _pointwise_one(name: str, kept: Kept, output: Kept, positions: Tensor) -> list[Spot]:
    indices = unravelled(positions, output.shape)
    aligned = indices[len(indices) - len(kept.shape) :] if kept.shape else []
    chosen = [i if size != 1 else torch.zeros_like(i) for i, size in zip(aligned, kept.shape, strict=True)]
    return [Spot(name, kept, distinct(ravelled(chosen, kept.shape)))]


def _differentiated(record: Record, output: Kept, positions: Tensor) -> list[Spot]:
    """Whatever has a derivative there: the operation is repeated with ordinary values in double precision."""
    if sum(kept.value.numel() for kept in record.operands.values()) + output.value.numel() > LARGEST_JACOBIAN:
        raise ValueError("too large")
    generator = torch.Generator().manual_seed(0)
    ordinary: dict[int, Tensor] = {}
    for kept in record.operands.values():
        if kept.value.is_floating_point():
            values = torch.rand(kept.shape, dtype=torch.float64, generator=generator) + 0.5
            ordinary[id(kept.value)] = values.requires_grad_()

    def replaced(item: Any) -> Any:
        if isinstance(item, Tensor):
            known = ordinary.get(id(item))
            return item if known is None else known.clone()  # the operation may write into it
        return type(item)(replaced(each) for each in item) if isinstance(item, (list, tuple)) else item

    with torch.enable_grad():
        result = record.function(
            *map(replaced, record.args), **{key: replaced(item) for key, item in record.kwargs.items()}
        )
        results = result if isinstance(result, (tuple, list)) else [result]
        chosen = next(item for item in results if isinstance(item, Tensor) and tuple(item.shape) == output.shape)
        inputs = list(ordinary.values())
        gradients = torch.autograd.grad(chosen.reshape(-1)[positions].sum(), inputs, allow_unused=True)
    by_id = {id(tensor): gradient for tensor, gradient in zip(inputs, gradients, strict=True)}
    found = []
    for name, kept in record.operands.items():
        tensor = ordinary.get(id(kept.value))
        gradient = None if tensor is None else by_id[id(tensor)]
        if gradient is not None and bool((gradient != 0).any()):
            found.append(_marked(name, kept, gradient != 0))
        elif gradient is not None and chosen is not results[0]:
            found.append(_aligned(name, kept, output, positions))
        elif tensor is None and not kept.value.is_floating_point():
            found.append(_whole(name, kept))
    return found


_WAYS: list[tuple[Callable[[Record, str], bool], Callable[[Record, Kept, Tensor], list[Spot]]]] = [
    (_is_pointwise, _pointwise),
    (lambda record, op: op in REDUCTIONS and len(record.operands) == 1, _reduction),
    (lambda record, op: op in ROWWISE, _rowwise),
    (lambda record, op: op in MOVING, _moving),
    (lambda record, op: op in PRODUCTS, _product),
    (lambda record, op: math.prod(record.outputs[0].shape) > 0, _differentiated),
]
