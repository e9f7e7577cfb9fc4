"""What is around torch's optimizers, and how to do without it.

torch wraps `Optimizer.step` in a mark for its profiler, which costs 20 to 30 µs also while no profiler runs, in a look for hooks,
and in a word to its compiler. That is a tenth of a small step. And what it wraps in that word loads the compiler when it is first
called, which takes as long as loading all the rest of torch.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

Step = Callable[[Optimizer], Any]

_GLOBAL_HOOKS: list[Any] = [
    getattr(torch_optimizer, name, None) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]
_profiler_runs: Any = getattr(torch.autograd, "_profiler_enabled", None)
_CAN_LOOK = _profiler_runs is not None and all(isinstance(hooks, dict) for hooks in _GLOBAL_HOOKS)


def quiet_step(optimizer: Any) -> Step | None:
    """The step alone, if nobody listens to it and nothing has taken its place."""
    own, kind = vars(optimizer), type(optimizer)
    if (
        "_optimizer_step_code" in own
        or not _CAN_LOOK
        or own.get("_optimizer_step_pre_hooks", True)
        or own.get("_optimizer_step_post_hooks", True)
    ):
        return None
    if _GLOBAL_HOOKS[0] or _GLOBAL_HOOKS[1] or _profiler_runs() or not getattr(kind.step, "hooked", False):
        return None
    if (replaced := own.get("step")) is not None:
        if not getattr(replaced, "_wrapped_by_lr_sched", False) or replaced.__wrapped__ is not kind.step:
            return None
        optimizer._opt_called = True  # what a schedule has wrapped it for
    return bare_step(kind)


def bare_step(kind: Any) -> Step | None:
    """The step that an optimizer's class defines: of torch's own without what torch puts around it, of others as it is. None if
    somebody else has put something around it."""
    return _unwrapped(kind.step, kind)


@functools.cache
def _unwrapped(step: Any, kind: Any) -> Step | None:
    if not kind.__module__.startswith("torch.optim."):
        return step.__wrapped__ if _is_torchs(step) else None
    if not is_only_torchs(step):
        return None
    inner: Step = inspect.unwrap(step)

    def alone(optimizer: Optimizer) -> Any:
        with torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)):
            return inner(optimizer)

    return alone


@functools.cache
def is_only_torchs(function: Any) -> bool:
    """Whether it is torch's, and whatever is around it is too: its compiler wraps more than its optimizers do."""
    return _is_torchs(inspect.unwrap(function, stop=lambda each: not _is_torchs(each)))


def _is_torchs(function: Any) -> bool:
    """By where it was written: the name and the module of a wrapper are those of what it wraps."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)


_TORCH = os.path.dirname(torch.__file__) + os.sep


def leave_compiler_alone() -> None:
    """Make, save and load optimizers without loading torch's compiler. Nothing can be compiled while it is not there; once
    someone has loaded it, all is as torch made it."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        wrapper = getattr(Optimizer, name)
        function = getattr(wrapper, "__wrapped__", None)
        if function is not None and not hasattr(function, _DISABLED) and "torch._dynamo" not in sys.modules:
            setattr(function, _DISABLED, functools.partial(_call, function, wrapper))


_DISABLED = "__dynamo_disable"


def _call(function: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    if "torch._dynamo" not in sys.modules:
        return function(*args, **kwargs)
    vars(function).pop(_DISABLED, None)
    return wrapper(*args, **kwargs)
