"""Runs variants in turn: a process each, one window of steps after the other's, so that a busy machine slows all alike."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timing:
    variant: str
    window: int
    seconds: list[float] = field(default_factory=list)
    """Of each window, by the clock."""
    cpu: list[float] = field(default_factory=list)
    """Of each window, those in which the process had a core: other people's load is not in them, nor is waiting for a disk."""
    about: dict[str, Any] = field(default_factory=dict)
    """Peak memory, and what else the worker reports."""

    @property
    def least(self) -> float:
        """Seconds of a step in the fastest window."""
        return min(self.seconds) / self.window

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) / self.window

    def ratio(self, base: Timing) -> float:
        """Median over the rounds of the ratio of neighbouring windows: what slows the machine slows both."""
        return statistics.median(own / other for own, other in zip(self.seconds, base.seconds, strict=True))

    def cpu_ratio(self, base: Timing) -> float:
        return statistics.median(own / other for own, other in zip(self.cpu, base.cpu, strict=True))


class Worker:
    def __init__(self, variant: str, workload: str, window: int, rounds: int, warmup: int, **options: Any) -> None:
        asked = {"variant": variant, "workload": workload, "window": window, "rounds": rounds, "warmup": warmup}
        asked |= {"reads": False, "phases": False, "fused": False} | options
        command = [sys.executable, "-m", "speed.worker", json.dumps(asked)]
        self.timing = Timing(variant, window)
        self.reads: list[int] = []
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def go(self) -> None:
        """Time one window."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        window = self._line()
        self.timing.seconds.append(window["seconds"])
        self.timing.cpu.append(window["cpu"])
        self.reads.append(window["reads"])

    def finish(self) -> Timing:
        self.timing.about = self._line()
        self._process.wait()
        return self.timing

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.timing.variant} failed; what it wrote is above.")
        return json.loads(line)  # type: ignore[no-any-return]


def compare(
    names: list[str], workload: str, window: int, rounds: int, warmup: int = 100, **options: Any
) -> list[Timing]:
    """Round-robin over the variants, in an order that turns round: none is always behind the same neighbour."""
    workers = [Worker(name, workload, window, rounds, warmup, **options) for name in names]
    for index in range(rounds):
        for worker in workers if index % 2 == 0 else reversed(workers):
            worker.go()
    return [worker.finish() for worker in workers]


def host_reads(name: str, workload: str, num_steps: int = 100) -> float:
    """Per step, with a fused optimizer: the others read tensors of their own on a CPU."""
    worker = Worker(name, workload, num_steps, 1, warmup=100, reads=True, fused=True)
    worker.go()
    worker.finish()
    return worker.reads[0] / num_steps


def phases(workload: str, num_steps: int = 300) -> dict[str, float]:
    """Seconds of each part of a step of SafeTrainer, medians."""
    worker = Worker("safetrain", workload, num_steps, 1, warmup=100, phases=True)
    worker.go()
    return worker.finish().about["phases"]  # type: ignore[no-any-return]
