"""Intercepts `optimizer.step()`, wherever it is called, so that the guard can refuse the update."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import UsageError
from ..optim.hooks import before_step

SEVERAL_CLOSURES = (
    "calls its closure several times within one step, so a step cannot be judged before it moves the weights.\n"
    "To fix: use a first-order optimizer such as torch.optim.AdamW, or examine batches with safetrain.forensics."
)
Decide = Callable[[Optimizer, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class OptimizerSteps:
    """Puts `decide(optimizer, proceed, args, kwargs)` in the place of each optimizer's step, until `remove`."""

    def __init__(self, optimizers: Sequence[Optimizer], decide: Decide) -> None:
        self._optimizers, self._decide = list(optimizers), decide
        self._passing = 0
        self._undo: list[Callable[[], None]] = []
        for optimizer in self._optimizers:
            self._install(optimizer)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, the optimizers step as if nobody watched."""
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _install(self, optimizer: Optimizer) -> None:
        own = vars(optimizer).get("step")  # a scheduler has put it there, to count
        proceed = optimizer.step
        function = getattr(proceed, "__func__", proceed)

        @functools.wraps(function)
        def step(this: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._passing:
                return proceed(*args, **kwargs)
            return self._decide(optimizer, self._passed(proceed), args, kwargs)

        ours = types.MethodType(step, optimizer)  # schedulers that are made later wrap a bound method
        optimizer.step = ours  # type: ignore[method-assign]
        tripwire = before_step(optimizer, self._reached)

        def undo() -> None:
            tripwire.remove()
            if vars(optimizer).get("step") is ours:
                if own is None:
                    del optimizer.step
                else:
                    optimizer.step = own  # type: ignore[method-assign]
            else:  # a scheduler has wrapped ours since
                self._passing += 1

        self._undo.append(undo)

    def _passed(self, proceed: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.passing():
                return proceed(*args, **kwargs)

        return call

    def _reached(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._passing:
            raise UsageError(
                f"{type(optimizer).__name__}.step was replaced after watch(), so this update would not have been judged.\n"
                "To fix: call watch() last, after everything that wraps or prepares the optimizer."
            )


def evaluated(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls the closure of `optimizer.step(closure)`, if there is one, as a first-order optimizer does first. The optimizer is then
    given one that returns that loss, once."""
    closure = args[0] if args else kwargs.get("closure")
    if not callable(closure):
        return None, (args, kwargs)
    with torch.enable_grad():
        value = closure()
    first, before = [value], _moved_by_step(optimizer)

    def again() -> Any:
        if not first or _moved_by_step(optimizer) != before:
            raise UsageError(f"{type(optimizer).__name__} {SEVERAL_CLOSURES}")
        return first.pop()

    return value, ((again, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": again})


def _moved_by_step(optimizer: Optimizer) -> list[tuple[int, int]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter._version, id(parameter.grad)) for parameter in parameters]
