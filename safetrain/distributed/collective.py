"""Small things that the processes of a run tell each other between steps. Alone, a process tells them to itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    return dist.get_rank() if num_processes() > 1 else 0


def gather(value: T, group: Any = None) -> list[T]:
    """Every process's value, in their order. All of them must call it, at the same point of the run."""
    size = num_processes()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def of_first(value: T, group: Any = None) -> T:
    """What process 0 has."""
    return gather(value, group)[0]


def by_first(action: Callable[[], T], group: Any = None) -> T:
    """What the action returns in process 0, the only one that runs it. If it raises there, every process raises that error."""
    if num_processes() == 1:
        return action()
    return together(action if process_rank() == 0 else lambda: None, group)[0]  # type: ignore[return-value]


def together(action: Callable[[], T], group: Any = None) -> list[T]:
    """What the action returns in each process. If it raises in one, every process raises: its own error, or the first other."""
    value: Any = None
    error: BaseException | None = None
    try:
        value = action()
    except Exception as raised:
        error = raised
    if num_processes() == 1:
        if error is not None:
            raise error
        return [value]
    answers = gather((value, None if error is None else _described(error)), group)
    if error is not None:
        raise error
    for _, described in answers:
        if described is not None:
            raise _rebuilt(described)
    return [answer for answer, _ in answers]


def _described(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    described = type(error), error.args, dict(vars(error))
    try:
        pickle.dumps(described)
    except Exception:  # of a local class, or with something in it that no other process can have
        return RuntimeError, (f"{type(error).__name__}: {error}",), {}
    return described


def _rebuilt(described: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]) -> BaseException:
    """The same error without its `__init__`, which may take something else than the arguments that it keeps."""
    kind, args, attributes = described
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error
