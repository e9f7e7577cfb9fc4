from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_runs import load, needs, run

from safetrain import FitResult


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., FitResult]:
    """Train a recipe or a config file, with overrides."""
    count = iter(range(100))

    def train(source: str | Path, *overrides: str) -> FitResult:
        needs(Path(source).stem)
        return run(load(source, *overrides), tmp_path / f"run-{next(count)}")

    return train
