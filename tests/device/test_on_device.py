"""Runs the scenarios of this directory on the test device, each file in a process of its own: the device cannot be taken back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCENARIOS = sorted(HERE.glob("scenarios/scenario_*.py"))
PROBE = "from torch.utils.backend_registration import _setup_privateuseone_for_python_backend"


@pytest.fixture(scope="module", autouse=True)
def needs_the_hook():
    try:
        exec(PROBE, {})
    except ImportError:
        pytest.skip("this torch has no backends in Python (_setup_privateuseone_for_python_backend)")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem.removeprefix("scenario_"))
def test_on_the_test_device(path, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(HERE.parents[1])]
    command += ["-o", "python_files=scenario_*.py", "--basetemp", str(tmp_path / "pytest"), str(path)]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE.parents[1], env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
