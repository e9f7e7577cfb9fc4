"""Every shipped config loads, shows how to run it, and trains."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from safetrain.cli.recipes import all_recipes, read_recipe
from safetrain.config import load_config
from safetrain.config.sources import recipe_names

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def commands(path: Path) -> list[list[str]]:
    """The `safetrain` commands in the comment at the top of a config."""
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return [shlex.split(found.group()) for line in header if (found := re.search(r"safetrain .*", line))]


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_the_files_are_the_recipes():
    found = [path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in CONFIGS]
    assert sorted(found) == recipe_names() == [recipe.name for recipe in all_recipes()]
    assert {"char_gpt", "quickstart"} <= set(found)


def test_config_loads_and_is_named_like_its_file(path: Path):
    assert load_config(path).name == path.stem


def test_header_shows_how_to_run_it(path: Path):
    shown = commands(path)
    assert ["safetrain", "fit", path.stem] in shown
    for command in shown:
        overrides = [word for word in command if "=" in word and not word.startswith("-")]
        load_config(path, overrides)


def test_header_states_the_facts(path: Path):
    recipe = read_recipe(path.stem)
    assert recipe.what.endswith((".", "?"))
    assert re.fullmatch(r"\d+ s", recipe.time)
    if recipe.breaks:
        assert recipe.breaks in recipe_names()
        assert not recipe.reaches
    else:
        assert recipe.data
        assert recipe.scales
        metric, relation, _ = recipe.goal()
        loop = load_config(path).loop
        assert (metric, relation) == (loop.monitor, "<=" if loop.monitor_mode == "min" else ">=")


def test_config_trains(path: Path, train):
    result = train(path, "loop.max_steps=2")
    if read_recipe(path.stem).breaks:  # some are refused at the first step
        assert result.steps == 2 or result.incidents
    else:
        assert result.healthy
        assert result.steps == 2
        assert math.isfinite(result.final_loss)
        assert load_config(path).loop.monitor in result.evaluations[-1]


@pytest.mark.slow
def test_quickstart_refuses_its_bad_steps_and_keeps_learning(train):
    result = train("quickstart")
    bad = [attempt for attempt, loss in enumerate(result.losses) if not math.isfinite(loss)]
    assert bad == [46, 93, 136]
    assert [incident.step for incident in result.incidents] == bad
    assert result.steps == 180
    assert result.losses[0] > 4.5
    before, after = result.losses[35:45], result.losses[-10:]
    assert sum(after) / 10 < 2.5 < sum(before) / 10
