"""Errors for training data of a kind that cannot be trained on (a class, a tensor), with what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import DataError


def check_kind(data: Any) -> None:
    """Raises for tensors, mappings and classes, which could be iterated over or called, but not as batches."""
    if inspect.isclass(data):
        raise DataError(
            f"the data is the class {data.__name__}, not an instance of it.\nTo fix: pass {data.__name__}(…)."
        )
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, list(data)[:5]))
        raise DataError(
            f"the data is a mapping with the keys {keys}; iterating over it gives its keys, not batches.\n"
            "To fix: pass a Dataset or a DataLoader; for a mapping of arrays, a Dataset whose __getitem__ gives one row of each. "
            "(Only eval_data may be a mapping: of evaluation data by name.)"
        )
    if isinstance(data, Tensor):
        raise DataError(
            f"the data is one tensor of shape {tuple(data.shape)}; iterating over it gives its rows, not batches.\n"
            "To fix: pass torch.utils.data.TensorDataset(inputs, targets), which data.batch_size then applies to."
        )
    if isinstance(data, (list, tuple)) and _are_columns(data):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in data)
        raise DataError(
            f"the data is a {type(data).__name__} of {len(data)} tensors of shapes {shapes}: that reads as {len(data)} batches, not as inputs and targets.\n"
            "To fix: pass torch.utils.data.TensorDataset(inputs, targets), which data.batch_size then applies to."
        )


def _are_columns(data: list[Any] | tuple[Any, ...]) -> bool:
    """Several tensors that belong together row by row, and do not look like batches of one kind."""
    if not 2 <= len(data) <= 8 or not all(isinstance(item, Tensor) and item.dim() for item in data):
        return False
    if len({item.shape[0] for item in data}) > 1:
        return False
    kinds = {(item.dtype, item.dim()) for item in data}
    return len(kinds) > 1 or (isinstance(data, tuple) and len({item.shape for item in data}) > 1)
