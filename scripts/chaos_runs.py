"""The runs that scripts/chaos kills and damages, and the child processes they run in."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safetrain import SafeTrainer


class Samples(torch.utils.data.Dataset):
    """Fixed random samples; some are NaN, so that guards refuse steps."""

    def __init__(self, length: int = 96, bad: tuple[int, ...] = (17, 60)) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 32, generator=generator)
        self.targets = torch.randn(length, 4, generator=generator)
        self.inputs[list(bad)] = float("nan")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Trainer(SafeTrainer):
    """With every kind of state that must survive: dropout, BatchNorm, momentum, a schedule, accumulation, EMA, refusals, backoff."""

    def build_model(self) -> nn.Module:
        width = 256
        return nn.Sequential(
            nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 4)
        )  # fmt: skip

    def build_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def build_data(self) -> Any:
        return Samples(), Samples(24, bad=())

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def on_incident(self, incident: Any) -> None:
        self.stream.skip(1)  # a skipped data window


def train(run_dir: Path, workers: int, precision: str, background: bool, max_steps: int, cls: type = Trainer) -> None:
    """Start or resume the run."""
    config = {
        "seed": 3,
        "data": {"batch_size": 4, "num_workers": workers},
        "loop": {
            "max_steps": max_steps,
            "grad_accum": 2,
            "ema": 0.9,
            "eval_every": 20,
            "precision": precision,
            "device": "cpu",
        },
        "guards": {"finite": {"state_every": 10}},
        "checkpoint": {"every_steps": 4, "snapshot_every": 10, "async": background},
        "logging": {"console": "off", "tensorboard": False},
    }
    cls(config=config, run_dir=run_dir).fit(resume="auto")


def in_child(work: Callable[[], None]) -> int:
    """Fork, because torch is loaded already. The child leads its own process group, which includes its workers."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        torch.set_num_threads(1)
        work()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def finish(child: int, seconds: float = 300.0) -> int:
    """The child's exit code."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    kill(child)
    os.waitpid(child, 0)
    raise TimeoutError(f"process {child} did not end within {seconds:.0f} s")
