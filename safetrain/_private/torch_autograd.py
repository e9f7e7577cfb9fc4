"""What is around torch's backward pass, and how to do without it.

`Tensor.backward` takes any number of tensors of any kind, and sorts out what it was given: 8 µs of a small step. What it then
calls, with all that torch does there for its compiler and its logs, needs a loss and its gradient, which is 1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from .torch_optim import is_only_torchs


def backward(loss: Tensor) -> None:
    """What `loss.backward()` does; by that very call if somebody has put something in its place, or the loss is unusual."""
    if (
        type(loss) is not Tensor
        or has_torch_function_unary(loss)  # of a mode
        or "backward" in loss.__dict__
        or loss.dim()
        or not loss.requires_grad
        or not is_only_torchs(Tensor.backward)
        or not is_only_torchs(torch.autograd.backward)
        or not _is_the_same()
    ):
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        _run_alone(loss)


def _run_alone(loss: Tensor) -> None:
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # by the name that torch calls it by
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


@functools.cache
def _is_the_same() -> bool:
    """Try it: this torch may be another one."""
    found = []
    for run in (Tensor.backward, _run_alone):
        leaf = torch.tensor([3.0, -2.0], device="cpu", requires_grad=True)
        with torch.enable_grad():
            loss = (leaf * leaf).sum()
        try:
            run(loss)
        except (AttributeError, TypeError, RuntimeError):
            return False
        found.append(leaf.grad)
    return found[1] is not None and torch.equal(*found)  # type: ignore[arg-type]
