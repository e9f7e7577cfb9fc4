"""Hooks of an optimizer, also of one that wraps another optimizer and has no hooks itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def before_step(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Called before each update. A wrapper that was made without `Optimizer.__init__` (opacus) has no hooks; the optimizer inside it has."""
    inner: Any = optimizer
    for _ in range(8):
        try:
            return inner.register_step_pre_hook(hook)  # type: ignore[no-any-return]
        except AttributeError:
            found = next(
                (vars(inner)[name] for name in ("original_optimizer", "optimizer") if name in vars(inner)), None
            )
            if found is None:
                raise
            inner = found
    return inner.register_step_pre_hook(hook)  # type: ignore[no-any-return]
