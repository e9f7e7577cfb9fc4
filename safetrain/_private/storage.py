"""Identity of a tensor's storage, and the stored values of a sparse tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature import Feature


def _probe() -> bool:
    rows = torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.long), torch.ones(2), (3,), check_invariants=True)
    return rows._values().numel() == 2  # each as it is stored, not their sum


SPARSE_VALUES = Feature(
    "sparse_values",
    relies_on="torch.Tensor._values",
    lost="the values of a sparse tensor in their own memory",
    instead="a coalesced copy is looked at: same verdicts, slower, and a trace does not follow values through a sparse tensor",
    probe=_probe,
)


def sparse_values(tensor: Tensor) -> Tensor:
    """Of a COO tensor: what it stores, each row as often as it is there."""
    if SPARSE_VALUES.works:
        return tensor._values()
    return tensor.coalesce().values()


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Equal for all tensors in one storage, and unique while it lives, also where it has no memory (meta tensors)."""
    identity: int | None = getattr(storage, "_cdata", None)
    return storage.data_ptr() if identity is None else identity
