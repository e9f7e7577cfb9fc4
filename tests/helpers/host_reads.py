"""Counts how often a number is copied from a tensor to Python."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts `Tensor.item` and everything else that reads a number on the host while a step runs, and `Tensor.tolist` always."""

    def __init__(self, trainer, monkeypatch):
        super().__init__()
        self.count, self.per_step = 0, []
        tolist, run_step = torch.Tensor.tolist, trainer.run_step

        def counted(tensor):  # it reads without being dispatched
            self.count += 1
            return tolist(tensor)

        def counting(window):
            before = self.count
            with self:
                run_step(window)
            self.per_step.append(self.count - before)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)
        trainer.run_step = counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
