"""From the start of a process to its first step, against importing torch and accelerate and building the model."""

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
    """Seconds and their ratio, medians and the least, of interleaved rounds; the first one warms the file cache."""
    base, fit = [], []
    for index in range(rounds + 1):
        pair = seconds(BASE, folder), seconds(FIT, f"{folder}/{index}")
        if index:
            base.append(pair[0])
            fit.append(pair[1])
    ratio = statistics.median(b / a for a, b in zip(base, fit, strict=True))
    medians = {"import": statistics.median(base), "fit": statistics.median(fit), "ratio": ratio}
    return {**medians, "least_import": min(base), "least_fit": min(fit), "least_ratio": min(fit) / min(base)}
