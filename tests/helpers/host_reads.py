"""Counts how often a number is copied from a tensor to Python."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts `Tensor.item` and everything else that reads a number on the host, except `tolist`."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def count_tolist(monkeypatch):
    """`Tensor.tolist` reads without being dispatched, so it is counted here."""
    counter = {"count": 0}
    plain = torch.Tensor.tolist

    def counted(self):
        counter["count"] += 1
        return plain(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    return counter
