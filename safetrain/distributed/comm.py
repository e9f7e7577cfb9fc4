"""All communication between ranks: objects between steps, vectors of numbers within them.

The functions work in any process. Alone, a process is its only rank; before a `Link` is open they use the default process
group, afterwards the link's own, which user code cannot get between and whose waits the watchdog can name.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._private import ddp
from ..errors import RankError
from .watchdog import Watchdog

T = TypeVar("T")


_open: Link | None = None


def num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    return dist.get_rank() if num_processes() > 1 else 0


def gather(value: T, group: Any = None) -> list[T]:
    """Every process's value, in their order. All of them must call it, at the same point of the run."""
    size = num_processes()
    if size == 1:
        return [value]
    if group is None and _open is not None:
        return _open.gather(value)
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


def overwrite(tensors: Sequence[Tensor], rank: int) -> None:
    """With the values that they have on that rank. All of them must call it."""
    for tensor in tensors:
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        group = _open.host_group if _open is not None and value.device.type == "cpu" else None
        dist.broadcast(value, rank, group=group)
        if process_rank() != rank:
            tensor.detach().copy_(value)


_COMMUNICATION = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|timed out waiting|broken pipe|process ?group", re.IGNORECASE
)

# From torch 2.13 on the second is only another name of the first, and warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_communication_error(error: BaseException) -> bool:
    """Did talking to another rank fail, rather than something that this rank computes?"""
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None


class PendingGather:
    """Numbers on their way to and from every rank."""

    def __init__(self, work: Any, received: Tensor) -> None:
        self._work, self._received = work, received

    def wait(self) -> Tensor:
        """One row for each rank; the same on all of them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


class Link:
    """The other processes of a run."""

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout_seconds: float) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        # A group of their own: what user code sends during a step cannot get between.
        self._objects = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._numbers = self._objects if device.type == "cpu" else None
        self.watchdog = Watchdog(rank, world_size, timeout_seconds, self._num_begun)
        self._explained: tuple[BaseException, RankError] | None = None
        global _open
        _open = self

    @property
    def host_group(self) -> Any:
        """Exchanges what is in the memory of the hosts, whatever the device."""
        return self._objects

    def _num_begun(self) -> int:
        """Collectives that this rank has begun: one that has begun fewer than others is what they wait for."""
        return ddp.num_collectives() + ddp.num_collectives(self._objects)

    def send(self, numbers: Tensor) -> PendingGather:
        """Begin to exchange a vector of equal length on every rank, without waiting."""
        received = numbers.new_empty(self.world_size * numbers.numel())
        work = _all_gather(received, numbers, group=self._numbers, async_op=True)
        return PendingGather(work, received.view(self.world_size, -1))

    def gather(self, what: Any, phase: str = "waiting for the other ranks") -> list[Any]:
        """What each rank gave, in their order. Slow, so only in trouble or at the rare moments of a run."""
        with self.watchdog.activity.waiting(phase):
            received: list[Any] = [None] * self.world_size
            dist.all_gather_object(received, what, group=self._objects)
            return received

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Around what each rank does on its own: if it fails on one, it has failed on all when this ends."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if is_communication_error(raised):
                raise
            error = raised
        self.fail_together(error, doing)

    def fail_together(self, error: Exception | None, doing: str) -> None:
        """Raise if any rank has an error: its own where there is one, else one that tells of the others'."""
        failures = self.gather(None if error is None else Failure.of(self.rank, error))
        if error is not None:
            raise error
        if failed := [failure for failure in failures if failure is not None]:
            raise failed[0].as_error(doing)

    def close(self) -> None:
        global _open
        _open = None if _open is self else _open
        self.watchdog.close()

    def explained(self, error: BaseException) -> BaseException:
        """An error of the communication, as one that names the rank that is missing and where it is."""
        if not is_communication_error(error):
            return error
        if self._explained is None or self._explained[0] is not error:
            self._explained = error, RankError(self.watchdog.who_is_missing(first_line(error)))
        return self._explained[1]


class Failure:
    """What a rank sends the others of an exception: exceptions themselves may not survive the way."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        self.rank, self.kind, self.message, self.trace = rank, kind, message, trace

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        import traceback

        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(rank, type(error).__name__, str(error), trace)

    def as_error(self, doing: str) -> RankError:
        return RankError(
            f"rank {self.rank} raised {self.kind} {doing}: {self.message}\n{self.trace.rstrip()}\n"
            f"To fix: correct what rank {self.rank} raised; this rank had no error of its own."
        )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
