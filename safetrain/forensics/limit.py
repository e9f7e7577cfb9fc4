"""Limits the operations of a replay to a few times those of the step: a changed step may never end (a solver, for
example)."""

from __future__ import annotations

from typing import Any

from .._private.autograd import TorchDispatchMode


class EndlessReplayError(RuntimeError):
    """Inside a replay only; its reader takes it for the step's own."""


class OperationLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, maximum: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = maximum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left = spent(self._left)
        return func(*args, **(kwargs or {}))


def spent(left: int) -> int:
    if left <= 0:
        raise EndlessReplayError("the changed step runs many times as many operations as the step did")
    return left - 1
