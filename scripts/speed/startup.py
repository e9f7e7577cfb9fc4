"""From the start of a process to its first step, against importing torch and accelerate and building the model.

Making any optimizer of torch imports its compiler, which takes as long as torch itself, in every loop. So there are two bases:
without an optimizer, and with one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

BASE = """
import torch, accelerate
from torch import nn
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
"""
WITH_OPTIMIZER = BASE + "torch.optim.AdamW(model.parameters())\n"
FIT = """
import os, sys
from torch import nn
from safetrain import SafeTrainer
import torch
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
def loss(model, batch):
    os.write(2, b"first step")
    os._exit(0)
data = [(torch.randn(4, 32), torch.zeros(4, dtype=torch.long))]
SafeTrainer(model, loss_fn=loss, train_data=data, run_dir=sys.argv[1] + "/run", config={"loop": {"max_steps": 1}}).fit()
"""


def seconds(code: str, folder: str) -> float:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    if code is FIT and "first step" not in done.stderr:
        raise SystemExit(f"the run did not get to its first step:\n{done.stderr}")
    return time.perf_counter() - begin


def measure(rounds: int, folder: str) -> dict[str, float]:
    """Seconds and their ratios, medians of interleaved rounds; the first one warms the file cache."""
    times: dict[str, list[float]] = {"import": [], "with_optimizer": [], "fit": []}
    for index in range(rounds + 1):
        for name, code in zip(times, (BASE, WITH_OPTIMIZER, FIT), strict=True):
            taken = seconds(code, f"{folder}/{index}")
            if index:
                times[name].append(taken)
    taken = {name: statistics.median(each) for name, each in times.items()}
    for base in ("import", "with_optimizer"):
        pairs = zip(times[base], times["fit"], strict=True)
        taken[f"ratio_to_{base}"] = statistics.median(fit / other for other, fit in pairs)
    return taken
