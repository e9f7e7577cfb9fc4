"""scripts/chaos.py: a short form in every test run, the full script with the slow tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chaos(tmp_path, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "scripts" / "chaos.py", "--directory", tmp_path, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kills(tmp_path):
    out = chaos(tmp_path, "kills", "--kills", "6", "--steps", "40")
    assert out.count("0 unloadable, 0 acknowledged saves lost, final state bit-identical") == 3


def test_system_calls(tmp_path):
    out = chaos(tmp_path, "syscalls", "--moments", "4", "--configs", "snapshots", "--seed", "3")
    assert "all bit-identical" in out or "cannot trace" in out


def test_damage(tmp_path):
    assert "60 bit flips" in chaos(tmp_path, "damage", "--flips", "60")


def test_full_disk(tmp_path):
    assert "nothing lost" in chaos(tmp_path, "full-disk", "--stages", "8")


def test_forged_runs(tmp_path):
    assert "20 mutated runs" in chaos(tmp_path, "forged", "--forged", "20", "--seed", "5")


@pytest.mark.slow
def test_the_full_script(tmp_path):
    out = chaos(tmp_path, "--kills", "30", "--flips", "200", "--stages", "30", "--forged", "100", "--moments", "5")
    assert out.count("0 unloadable, 0 acknowledged saves lost, final state bit-identical") == 3
    assert "nothing was lost" in out
