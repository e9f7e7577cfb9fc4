"""What does telemetry cost per step? See `scripts/bench_telemetry --help`."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safetrain import SafeTrainer
from safetrain.telemetry import Telemetry

LIMIT = 0.02
BLOCK = 50
"""Steps that are timed together: about a second, so that periodic output happens several times."""


class Work(nn.Module):
    """A small network, with additional multiplications to reach the given step time."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 1))
        self._matrix = torch.randn(256, 256)
        self._num_rounds = 1
        begin, rounds = time.process_time(), 200
        for _ in range(rounds):
            self._matrix @ self._matrix
        self._num_rounds = max(1, round(milliseconds / 1000 * rounds / (time.process_time() - begin)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._num_rounds):
            self._matrix @ self._matrix
        return self.layers(x)


class Timed(SafeTrainer):
    """Alternates blocks of steps with and without telemetry. Telemetry calls are also timed directly."""

    logging_time = 0.0
    """Processor time of telemetry calls in the training thread."""
    blocks: dict[bool, list[float]]
    """Processor time of the blocks in all threads, with (True) and without (False) telemetry."""

    def on_commit(self, view: Any) -> None:
        if view.step == 0:
            self.active, self.silent = self.run.telemetry, Telemetry()
            self.silent.stepped = lambda record: None  # type: ignore[method-assign]
            self.blocks = {True: [], False: []}
            self.run.stepped = self.timed(self.run.stepped)  # type: ignore[method-assign]
        if (view.step + 1) % BLOCK:
            return
        now = time.process_time()
        is_logged = self.run.telemetry is self.active
        if view.step >= 2 * BLOCK:  # the first two warm up
            self.blocks[is_logged].append(now - self.begin)
        else:
            self.logging_time = 0.0
        self.run.telemetry = self.silent if is_logged else self.active
        self.active.is_busy = is_logged  # also disables histograms
        self.begin = time.process_time()

    def timed(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                if self.run.telemetry is self.active:
                    self.logging_time += time.thread_time() - begin

        return call


def terminal() -> Any:
    """A pseudo-terminal whose output is discarded."""
    controller, screen = pty.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(controller, 65536):
                pass

    threading.Thread(target=drain, daemon=True).start()
    return os.fdopen(screen, "w")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_telemetry", description=__doc__)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="length of a step (default 20)")
    parser.add_argument("--pairs", type=int, default=15, help="blocks of each kind (default 15)")
    parser.add_argument("--console", choices=["live", "plain", "off"], default="live")
    parser.add_argument("--no-tensorboard", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Work(options.milliseconds)
    batches = [(torch.randn(32, 64), torch.randn(32, 1)) for _ in range(BLOCK)]
    stdout, steps = sys.stdout, BLOCK * 2 * (options.pairs + 1)
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "loop": {"max_steps": steps},
            "logging": {
                "console": {"live": "auto"}.get(options.console, options.console),
                "tensorboard": not options.no_tensorboard,
            },
            "checkpoint": {"every_steps": None, "snapshot_every": None},
        }
        trainer = Timed(model, loss_fn=nn.MSELoss(), train_data=batches, config=config, run_dir=Path(directory) / "run")
        with terminal() if options.console == "live" else open(os.devnull, "w") as sys.stdout:
            trainer.fit()
        sys.stdout = stdout
    silent = statistics.median(trainer.blocks[False]) / BLOCK
    num_logged = BLOCK * len(trainer.blocks[True])
    logging_time = trainer.logging_time / num_logged
    share = logging_time / silent
    by_turns = statistics.median(trainer.blocks[True]) / BLOCK / silent - 1
    print(f"a step without telemetry    {1000 * silent:7.3f} ms of processor time")
    print(f"telemetry                   {1000 * logging_time:7.3f} ms")
    print(f"share of the step           {100 * share:7.2f}%, limit {100 * LIMIT:.0f}%")
    print(
        f"  by blocks                 {100 * by_turns:7.2f}% (blocks with against without telemetry; noisy on a busy machine)"
    )
    return 0 if share <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
