"""Every config that ships must load, name only things that exist, and train."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from safetrain import SafeTrainer
from safetrain.config import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def commands(path: Path) -> list[list[str]]:
    """The `safetrain` commands in the comment at the top of a config."""
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return [shlex.split(found.group()) for line in header if (found := re.search(r"safetrain .*", line))]


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_there_are_configs():
    assert {"char_gpt", "quickstart"} <= {path.stem for path in CONFIGS}


def test_config_loads_and_is_named_like_its_file(path: Path):
    assert load_config(path).name == path.stem


def test_header_shows_how_to_run_it(path: Path):
    shown = commands(path)
    assert ["safetrain", "fit", path.stem] in shown
    for command in shown:
        overrides = [word for word in command if "=" in word and not word.startswith("-")]
        load_config(path, overrides)


def test_config_trains(path: Path, tmp_path: Path):
    config = load_config(path, ["loop.max_steps=2", "logging.console=false", "logging.tensorboard=false"])
    result = SafeTrainer(config=config, run_dir=tmp_path / "run").fit()
    assert result.healthy
    assert result.steps == 2


@pytest.mark.slow
def test_quickstart_meets_its_fault_and_goes_on_learning(tmp_path: Path):
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["logging.console=false"])
    result = SafeTrainer(config=config, run_dir=tmp_path / "run").fit()
    bad = [attempt for attempt, loss in enumerate(result.losses) if not math.isfinite(loss)]
    assert bad == [46, 93, 136]
    assert [incident.step for incident in result.incidents] == bad
    assert result.steps == config.loop.max_steps
    assert result.losses[0] > 4.5
    before, after = result.losses[35:45], result.losses[-10:]
    assert sum(after) / 10 < 2.5 < sum(before) / 10
