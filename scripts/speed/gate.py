"""Where a loop waits for its turn: every variant runs in a process of its own, one window of steps after the other's."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts how often a number gets from a tensor to Python."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        HostReads.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        plain = torch.Tensor.tolist

        def counted(tensor: Any) -> Any:  # reads without being dispatched
            HostReads.count += 1
            return plain(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign]
        return super().__enter__()


class Gate:
    """Counts steps. After the warm-up it prints the time of each window, and waits for a line on standard input."""

    def __init__(self, warmup: int, window: int, rounds: int, count_reads: bool = False, phases: bool = False) -> None:
        self.warmup, self.window = warmup, window
        self.num_steps = warmup + window * rounds
        self.notes: dict[str, Any] = {}
        self._count_reads, self._phases = count_reads, phases
        self._seen = 0
        self._begin: float | None = None
        self._cpu_begin = 0.0
        self._out = sys.stdout
        self._reads = HostReads() if count_reads else None
        self.phases: dict[str, list[float]] = {}

    def step(self) -> None:
        self._seen += 1
        if self._seen < self.warmup or (self._seen - self.warmup) % self.window:
            return
        if self._begin is not None:
            cpu = time.process_time() - self._cpu_begin
            self._report({"seconds": time.perf_counter() - self._begin, "cpu": cpu, "reads": HostReads.count})
        elif self._reads is not None:
            self._reads.__enter__()
        if self._seen < self.num_steps:
            sys.stdin.readline()
        HostReads.count = 0
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()

    def finish(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        middle = {name: sorted(times)[len(times) // 2] for name, times in self.phases.items() if times}
        self._report({"peak_mb": peak, "phases": middle, **self.notes})

    def _report(self, about: dict[str, Any]) -> None:
        self._out.write(json.dumps(about) + "\n")
        self._out.flush()

    def watch(self, trainer: Any) -> None:
        """Time the parts of a step, if that was asked for."""
        if not self._phases:
            return
        step = trainer.stepper
        places = {
            "data": (trainer, "_next_window"),
            "begin: remember what a step may change": (step, "begin"),
            "forward": (step, "forward"),
            "backward": (step.precision, "backward"),
            "look for writes": (step.transaction, "notice_writes"),
            "measure: norm, signals, one vector": (step, "measure"),
            "read: the view on the host": (step, "view"),
            "judge": (step, "judge"),
            "commit: update, advance, learn": (step, "commit"),
            "  of which learn": (step, "learn"),
            "log": (trainer, "_committed"),
        }
        for name, (owner, method) in places.items():
            setattr(owner, method, _timed(getattr(owner, method), self.phases.setdefault(name, [])))


def _timed(function: Any, times: list[float]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(time.perf_counter() - begin)
        return result

    return timed
