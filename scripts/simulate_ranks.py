"""Faults on one of many simulated ranks, decided by the real agreement code. See `scripts/simulate_ranks --help`."""

from __future__ import annotations

import argparse
import math
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from safetrain.core.verdict import Action, Verdict, merge
from safetrain.distributed.agreement import HEAD, Layout, RankDecision, RankReports, RankState, RankStatus, merged
from safetrain.distributed.mailbox import Mailbox, period
from safetrain.distributed.stragglers import WINDOW, Stragglers
from safetrain.distributed.watchdog import Watchdog
from safetrain.errors import RankError
from safetrain.step.rank_numbers import RankNumbers

NAMES = (
    "loss/0",
    "signal/finite.state",
    "signal/finite.buffers",
    "signal/stall.zeros",
    "signal/sanity.weights",
    "metric/accuracy",
)
"""What a usual step reports."""


class Transport:
    """Collectives of threads of one process: a list for each, filled by all ranks before any of them goes on."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=120)
        self._slots: dict[tuple[str, int], list[Any]] = {}
        self._tables: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def gather(self, kind: str, number: int, rank: int, value: Any) -> list[Any]:
        with self._lock:
            slots = self._slots.setdefault((kind, number), [None] * self._num_ranks)
        slots[rank] = value
        self._barrier.wait()
        return slots

    def table(self, number: int, rank: int, numbers: torch.Tensor) -> torch.Tensor:
        """All ranks get the same memory: each would make its own, on a machine of its own."""
        slots = self.gather("numbers", number, rank, numbers)
        with self._lock:
            if number not in self._tables:
                self._tables[number] = torch.stack(slots)
        return self._tables[number]


class Pending:
    def __init__(self, rows: Callable[[], torch.Tensor]) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        return self._rows()


class SimulatedLink:
    """What `RankNumbers` needs of the other ranks."""

    device = torch.device("cpu")

    def __init__(self, transport: Transport, rank: int, world_size: int) -> None:
        self._transport, self.rank, self.world_size = transport, rank, world_size
        self.watchdog = Watchdog(rank, world_size, mailbox=Mailbox(None))
        self._numbers = self._objects = 0

    def send(self, numbers: torch.Tensor) -> Pending:
        self._numbers += 1
        number = self._numbers
        return Pending(lambda: self._transport.table(number, self.rank, numbers))

    def gather(self, what: Any, phase: str = "") -> list[Any]:
        self._objects += 1
        return self._transport.gather("objects", self._objects, self.rank, what)


@dataclass
class Status:
    """Of a simulated run."""

    signal: int | None = None
    out_of_time: bool = False
    stop_reason: str | None = None
    decided: int = 1

    def trail(self) -> int:
        return self.decided


@dataclass
class Step:
    index: int = 0


@dataclass
class Answer:
    """What a rank concluded."""

    verdict: str = ""
    named: int | None = None
    seconds: float = 0.0


FAULTS = ("nan", "raise", "raise for good", "sigterm", "no more data", "diverged")


def take_part(rank: int, fault: str, guilty: int, transport: Transport, world_size: int, answers: list[Answer]) -> None:
    """Two healthy steps and a faulty one, of one rank."""
    numbers = RankNumbers(SimulatedLink(transport, rank, world_size))  # type: ignore[arg-type]
    status, is_guilty = Status(), rank == guilty
    for index in range(3):
        is_faulty = index == 2 and is_guilty
        values = {name: [float(rank + 1)] for name in NAMES}
        state = RankState.STEP
        if is_faulty:
            values["loss/0"] = [math.nan] if fault == "nan" else values["loss/0"]
            state = {"raise": RankState.FAILED, "raise for good": RankState.FATAL, "no more data": RankState.END}.get(
                fault, state
            )
            status.signal = 15 if fault == "sigterm" else None
            status.decided += fault == "diverged"
        numbers.begin_attempt()
        numbers.send(status, state, values)
        begin = time.thread_time()
        try:
            numbers.receive(Step(index))  # type: ignore[arg-type]
        except RankError as error:
            named = int(str(error).partition("rank ")[2].split()[0].rstrip(","))
            answers[rank] = Answer("diverged", named, time.thread_time() - begin)
            return
        numbers.means(1)
        if index == 2:
            answers[rank] = conclude(numbers, time.thread_time() - begin)


def conclude(numbers: RankNumbers, seconds: float) -> Answer:
    reports: RankReports = numbers.reports
    for state, name in (
        (RankState.FATAL, "raise for good"),
        (RankState.FAILED, "raise"),
        (RankState.END, "no more data"),
    ):
        if found := reports.in_state(state):
            return Answer(name, reports.suspects[0] if state is not RankState.END else found[0], seconds)
    if reports.signal is not None:
        return Answer("sigterm", next(r for r, s in enumerate(reports.statuses) if s.signal), seconds)
    if math.isnan(numbers.means(1)["loss"]):
        own = merge([("finite", Verdict(Action.SKIP, reason="NaN"))])
        decisions = numbers.link.gather(RankDecision(own))
        decision = merged(decisions, reports.suspects)
        return Answer("nan", decision.verdicts["finite"].evidence["rank"], seconds)
    return Answer("healthy", None, seconds)


def simulate(fault: str, world_size: int, rng: random.Random) -> tuple[bool, float]:
    """Whether all ranks reached the same right verdict, and the seconds of the host that the slowest needed for it."""
    guilty, transport = rng.randrange(1, world_size), Transport(world_size)
    answers = [Answer() for _ in range(world_size)]
    threads = [
        threading.Thread(target=take_part, args=(rank, fault, guilty, transport, world_size, answers), daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    good = all((answer.verdict, answer.named) == (fault, guilty) for answer in answers)
    return good, sorted(answer.seconds for answer in answers)[world_size // 2]


class MemoryStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, text: str) -> None:
        self.values[key] = text.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


class NearMailbox(Mailbox):
    """Of a store in this process, which always answers."""

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        return call(self._store)


@dataclass
class Others:
    """The signs of life of all ranks but one, given by one thread."""

    store: MemoryStore
    dogs: list[Watchdog]
    gone: int | None
    stop: threading.Event = field(default_factory=threading.Event)

    def live(self) -> None:
        while not self.stop.is_set():
            for dog in self.dogs:
                if dog.rank != self.gone:
                    dog._report()
            self.stop.wait(0.05)


def simulate_missing(world_size: int, is_gone: bool, rng: random.Random) -> tuple[bool, float]:
    """A rank that hangs, or is gone: does rank 0 name it, and after how many seconds?"""
    guilty, store = rng.randrange(1, world_size), MemoryStore()
    threads_started = Watchdog._live
    Watchdog._live = lambda self: None  # type: ignore[method-assign]
    try:
        dogs = [
            Watchdog(rank, world_size, progress=lambda rank=rank: 7 - (rank == guilty), mailbox=NearMailbox(store))  # type: ignore[misc]
            for rank in range(world_size)
        ]
    finally:
        Watchdog._live = threads_started  # type: ignore[method-assign]
    others = Others(store, dogs[1:], guilty if is_gone else None)
    if is_gone:
        dogs[guilty]._report()
    thread = threading.Thread(target=others.live, daemon=True)
    thread.start()
    begin = time.perf_counter()
    survey = dogs[0]._survey()
    seconds = time.perf_counter() - begin
    others.stop.set()
    thread.join(60)
    return survey.behind == [guilty], seconds


def simulate_slow(world_size: int, rng: random.Random) -> tuple[bool, float]:
    guilty, watch, found = rng.randrange(world_size), Stragglers(world_size), []
    noise = np.random.default_rng(rng.randrange(10**6))
    for index in range(WINDOW):
        seconds = noise.uniform(0.08, 0.12, (world_size, 2))
        seconds[guilty, 1] *= 3
        found += watch.add(seconds, 0.5 * index)
    return [(slow.rank, slow.phase) for slow in found] == [(guilty, "forward")], 0.0


def costs(world_size: int) -> tuple[int, int, float, float]:
    """Bytes sent and received by a rank in a step, signs of life that the store gets in a second, and microseconds of the host."""
    layout = Layout()
    layout.extend(NAMES)
    packed = layout.pack(
        RankStatus(RankState.STEP, trail=3), {name: [1.0] for name in NAMES}, torch.device("cpu")
    ).numpy()
    table = np.broadcast_to(packed, (world_size, len(packed))).copy()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        reports = layout.unpack(table)
        assert not reports.diverged
        for name in NAMES:
            reports.rows.mean(name)  # type: ignore[attr-defined]
        times.append(time.perf_counter() - begin)
    assert len(packed) == HEAD + 2 * len(NAMES)
    return packed.nbytes, table.nbytes, world_size / period(world_size), 1e6 * sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1, help="of each fault, on another rank each time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    threading.stack_size(256 * 1024)
    torch.set_num_threads(1)
    rng, good = random.Random(options.seed), True
    print(f"{options.ranks} ranks; the same verdict on all, and the right rank named:")
    table: dict[str, Callable[[], tuple[bool, float]]] = {
        **{fault: lambda fault=fault: simulate(fault, options.ranks, rng) for fault in FAULTS},  # type: ignore[misc]
        "hangs": lambda: simulate_missing(options.ranks, False, rng),
        "is gone": lambda: simulate_missing(options.ranks, True, rng),
        "is slow": lambda: simulate_slow(options.ranks, rng),
    }
    for name, once in table.items():
        outcomes = [once() for _ in range(options.rounds)]
        right, slowest = sum(each for each, _ in outcomes), max(seconds for _, seconds in outcomes)
        good = good and right == options.rounds
        print(f"  {name:16} {right} of {options.rounds}, {1000 * slowest:8.1f} ms", flush=True)
    print("a healthy step of one rank, with one collective:")
    print("     ranks   bytes sent   received   signs of life/s   host µs")
    for world_size in (8, 64, 1024, 10_000):
        sent, received, signs, microseconds = costs(world_size)
        print(f"  {world_size:8,} {sent:12,} {received:10,} {signs:17,.0f} {microseconds:9.0f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
