"""An optimizer's step without what surrounds it, when nobody listens there.

torch wraps `Optimizer.step` in a mark for its profiler, which costs 20 to 30 µs also while no profiler runs, and in a look
for hooks. That is a tenth of a small step. The step itself is the same function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_GLOBAL_HOOKS: list[Any] = [
    getattr(torch_optimizer, name, None) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]
_profiler_runs: Any = getattr(torch.autograd, "_profiler_enabled", None)
_CAN_LOOK = _profiler_runs is not None and all(isinstance(hooks, dict) for hooks in _GLOBAL_HOOKS)


def step(optimizer: Optimizer) -> None:
    """What `optimizer.step()` does; by that very call if anything listens to it, or has taken its place."""
    inner = _inner(optimizer)
    if inner is None:
        optimizer.step()
    else:
        inner(optimizer)


def _inner(optimizer: Any) -> Any:
    """The function that torch has wrapped, if it alone may be called."""
    own = vars(optimizer)
    if not _CAN_LOOK or "step" in own:  # a scheduler notes calls in a step of its own
        return None
    if own.get("_optimizer_step_pre_hooks", True) or own.get("_optimizer_step_post_hooks", True):
        return None
    if _GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1] or _profiler_runs():
        return None
    wrapped = type(optimizer).step
    return getattr(wrapped, "__wrapped__", None) if getattr(wrapped, "hooked", False) else None
