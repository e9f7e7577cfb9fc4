"""`safetrain recipes`: the list agrees with the headers, and a copy is self-contained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_runs import load, needs, run

from safetrain.cli.main import run as safetrain
from safetrain.cli.recipes import Recipe, all_recipes, copies, read_recipe
from safetrain.config.sources import recipe_names
from safetrain.errors import UsageError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_ls_shows_what_data_time_and_metric_of_every_recipe(capsys: pytest.CaptureFixture[str]):
    assert safetrain(["recipes", "ls"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for recipe in all_recipes():
        for fact in (recipe.name, recipe.reaches, recipe.data):
            assert fact in shown
        if not recipe.breaks:
            assert recipe.time in shown


def test_ls_as_json_holds_every_fact(capsys: pytest.CaptureFixture[str]):
    assert safetrain(["recipes", "ls", "--json"]) == 0
    assert [Recipe(**facts) for facts in json.loads(capsys.readouterr().out)] == all_recipes()


def test_header_is_read():
    recipe = read_recipe("image")
    assert recipe.what == "A small residual network that classifies images."
    assert recipe.goal() == ("accuracy", ">=", 0.98)
    assert read_recipe("image_broken").breaks == "image"
    with pytest.raises(UsageError, match="does not say what it reaches"):
        read_recipe("image_broken").goal()


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_trains_by_itself(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    needs(name)
    dest = tmp_path / "copy"
    assert safetrain(["recipes", "cp", name, str(dest)]) == 0
    assert f"safetrain fit {dest / name}.yaml" in capsys.readouterr().out
    for config in dest.glob("*.yaml"):
        text = config.read_text(encoding="utf-8")
        assert "../" not in text
        assert f"safetrain fit {config.stem}.yaml" in text
    config = load(dest / f"{name}.yaml", "loop.max_steps=1", "recovery.max_refusals=1")
    for part in (config.model, config.data.train, config.loss):
        assert part is not None
        assert Path(part["_target_"].partition(":")[0]).is_relative_to(dest)
    result = run(config, tmp_path / "run")
    assert result.attempted > 0


def test_the_default_destination_is_a_directory_of_that_name():
    assert safetrain(["recipes", "cp", "vae"]) == 0
    files = sorted(path.relative_to("vae").as_posix() for path in Path("vae").rglob("*") if path.is_file())
    assert files == sorted(path.as_posix() for path in copies("vae"))
    assert {"vae.yaml", "vae.py", "shared/datasets.py", "shared/digits.npz"} <= set(files)


def test_a_copy_of_a_config_that_extends_another_holds_both():
    assert {Path("char_gpt_broken.yaml"), Path("char_gpt.yaml"), Path("char_gpt.py")} == set(copies("char_gpt_broken"))


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]):
    Path("mine").mkdir()
    Path("mine/vae.py").write_text("precious", encoding="utf-8")
    assert safetrain(["recipes", "cp", "vae", "mine"]) == 2
    assert "vae.py" in capsys.readouterr().err
    assert Path("mine/vae.py").read_text(encoding="utf-8") == "precious"
    assert [path.name for path in Path("mine").iterdir()] == ["vae.py"]
    Path("mine/vae.py").rename("mine/notes.txt")  # other files stay
    assert safetrain(["recipes", "cp", "vae", "mine"]) == 0
    assert Path("mine/notes.txt").read_text(encoding="utf-8") == "precious"


def test_a_misspelt_name_gets_a_hint(capsys: pytest.CaptureFixture[str]):
    assert safetrain(["recipes", "cp", "difusion"]) == 2
    assert "did you mean 'diffusion'?" in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_a_copy_runs_from_anywhere_by_the_command(tmp_path: Path):
    assert safetrain(["recipes", "cp", "tabular", str(tmp_path / "copy")]) == 0
    program = [sys.executable, "-m", "safetrain", "fit", str(tmp_path / "copy" / "tabular.yaml"), "--fast-dev-run"]
    done = subprocess.run(program, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 steps committed" in done.stdout
