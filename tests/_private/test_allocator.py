"""Memory that a step frees is not asked for anew by the next one."""

import os
import resource
import subprocess
import sys

import pytest
import torch

from safetrain import SafeTrainer
from safetrain._private import allocator
from safetrain.trainer import engine

STEPS = """
import resource, sys, torch
from safetrain import SafeTrainer
torch.set_num_threads(1)

class Large(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).expand(8, 2**19).exp().mean()  # 16 MB are allocated and freed

seen = []
class Watched(SafeTrainer):
    def on_commit(self, view):
        seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

config = {"checkpoint": {"snapshot_every": None}}
data = [torch.ones(8, 2)] * 40
Watched(Large(2, 1), loss_fn=lambda model, x: model(x), train_data=data, config=config, run_dir=sys.argv[1]).fit()
print((seen[-1] - seen[19]) / 20)  # the heap has found its layout by then
"""


def faults_per_step(path, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in allocator._SETTINGS}
    command = [sys.executable, "-c", STEPS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment})
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not allocator._is_glibc(), reason="another C library")
def test_a_step_does_not_fault_in_the_memory_of_the_one_before(tmp_path):
    # What the environment says is left alone; with this it is as before the library has adapted to a program.
    settings = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    returned = faults_per_step(tmp_path / "returned", **settings)
    assert returned > 2**24 / resource.getpagesize()
    assert faults_per_step(tmp_path / "kept") < returned / 3


def test_another_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: None, raising=False)
    assert not allocator.keep_freed_memory()


@pytest.mark.parametrize("keep", [True, False])
def test_it_can_be_turned_off(monkeypatch, keep):
    called = []
    monkeypatch.setattr(engine, "keep_freed_memory", lambda: called.append(True))
    config = {"loop": {"keep_memory": keep, "device": "cpu"}}
    SafeTrainer(torch.nn.Linear(1, 1), loss_fn=torch.nn.MSELoss(), train_data=[], config=config)
    assert bool(called) is keep
