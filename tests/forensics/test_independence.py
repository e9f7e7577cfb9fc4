"""Forensics works in any loop: it loads neither the trainer nor what only the trainer needs."""

from __future__ import annotations

import subprocess
import sys

INVESTIGATE = """
import sys
import torch
from safetrain.forensics import investigate

model, batch = torch.nn.Linear(4, 1), torch.rand(8, 4)
optimizer = torch.optim.Adam(model.parameters())
assert investigate(model, lambda model, x: model(x).mean(), batch, optimizer, "bf16") is None
batch[5] = 0
incident = investigate(model, lambda model, x: model(x / x.sum(1, keepdim=True)).mean(), batch, optimizer)
assert (incident.cause.label, incident.samples) == ("division_by_zero", [5])
incident.to_dict()
print("loaded", *sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("safetrain.")}))
print("loaded", *sorted({name.partition(".")[0] for name in sys.modules}))
assert "INCIDENT" in incident.render()
"""
OURS = {"errors", "core", "_private", "distributed", "tensors", "precision", "forensics"}
THEIRS = {"accelerate", "omegaconf", "rich", "tensorboard", "matplotlib"}


def test_neither_a_healthy_nor_a_bad_step_loads_the_trainer() -> None:
    done = subprocess.run([sys.executable, "-c", INVESTIGATE], capture_output=True, text=True, check=True)
    ours, everything = (set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("loaded"))
    assert ours == {f"safetrain.{name}" for name in OURS}
    assert not everything & THEIRS
