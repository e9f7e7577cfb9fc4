"""Memory that a step frees is not requested again by the next one, in a run that the command line started."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import safetrain
from safetrain._private import allocator
from safetrain.cli import fit as fit_command
from safetrain.cli.main import run

TRAINER = """
import resource, torch
from safetrain import SafeTrainer

class Large(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).expand(8, 2**19).exp().mean()  # 16 MB are allocated and freed

class Watched(SafeTrainer):
    faults = []

    def build_model(self):
        torch.set_num_threads(1)
        return Large(2, 1)

    def build_data(self):
        return [torch.ones(8, 2)] * 40

    def training_step(self, model, batch):
        return model(batch)

    def on_commit(self, view):
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        if len(self.faults) == 40:
            print((self.faults[-1] - self.faults[19]) / 20, flush=True)  # the heap has found its layout by then
"""
CONFIG = """
trainer: {_target_: ./watched.py:Watched}
loop: {device: cpu}
checkpoint: {snapshot_every: null}
logging: {console: off, tensorboard: false}
"""
WITHOUT_ADAPTING = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""As it is before the C library has adapted to a program. What the environment says is left alone."""

needs_glibc = pytest.mark.skipif(not allocator.KEEP_MEMORY.works, reason="another C library")


def faults_per_step(path, command, **environment):
    (path / "watched.py").write_text(TRAINER)
    (path / "config.yaml").write_text(CONFIG)
    kept = {name: value for name, value in os.environ.items() if name not in allocator.SETTINGS}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=path, env={**kept, **environment}
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def fit(path, *overrides, **environment):
    path.mkdir()
    command = ["-m", "safetrain", "fit", "config.yaml", "--out", "run", *overrides]
    return faults_per_step(path, command, **environment)


@needs_glibc
def test_a_step_does_not_fault_in_the_memory_of_the_one_before(tmp_path):
    returned = fit(tmp_path / "returned", **WITHOUT_ADAPTING)
    assert returned > 2**24 / resource.getpagesize()
    assert fit(tmp_path / "kept") < returned / 3


@pytest.mark.parametrize(("overrides", "is_called"), [([], True), (["loop.keep_memory=false"], False)])
def test_the_command_line_asks_for_it_unless_it_is_turned_off(tmp_path, monkeypatch, overrides, is_called):
    called = []
    monkeypatch.setattr(fit_command, "keep_freed_memory", lambda: called.append(True))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watched.py").write_text(TRAINER)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert run(["fit", "config.yaml", "--out", "run", "loop.max_steps=1", *overrides]) == 0
    assert bool(called) is is_called


def test_a_program_that_uses_the_library_is_left_alone():
    files = [path for path in Path(safetrain.__file__).parent.rglob("*.py") if "keep_freed_memory" in path.read_text()]
    assert {path.name for path in files} == {"allocator.py", "fit.py"}


def test_another_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: None, raising=False)
    allocator.KEEP_MEMORY.ask_again()
    try:
        assert not allocator.keep_freed_memory()
    finally:
        monkeypatch.undo()
        allocator.KEEP_MEMORY.ask_again()
