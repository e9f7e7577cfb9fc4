"""A run with three kinds of incidents, skipped steps, evaluations and checkpoints; trained once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_pages import train


@pytest.fixture(scope="session")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("faulty") / "run"
    train(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("healthy") / "run"
    train(run_dir, "loop.max_steps=30", "loop.max_epochs=null")
    return run_dir
