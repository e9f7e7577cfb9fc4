"""`safetrain init`: the project it makes trains and passes its own test, and nothing is ever overwritten."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import safetrain
from safetrain.cli.main import run
from safetrain.config import load_config
from safetrain.lint import lint_paths

FILES = ["config.yaml", "data.py", "model.py", "test_smoke.py"]


def program(*arguments, cwd):
    """A process of its own: the project's `model` and `data` are modules with common names."""
    root = str(Path(safetrain.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_files_are_created_and_the_next_steps_shown(capsys):
    assert run(["init", "deep/project"]) == 0
    out = capsys.readouterr().out
    assert sorted(path.name for path in Path("deep/project").iterdir()) == FILES
    assert [line for line in out.splitlines() if line.startswith("created")] == [
        f"created deep/project/{f}" for f in FILES
    ]
    for step in ("cd deep/project", "safetrain fit config.yaml", "pytest"):
        assert step in out


def test_the_current_directory_needs_no_cd(capsys):
    Path("README.md").write_text("mine")
    assert run(["init", "."]) == 0
    assert "cd " not in capsys.readouterr().out
    assert Path("README.md").read_text() == "mine"


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(name, capsys):
    Path("p").mkdir()
    Path("p", name).write_text("mine")
    assert run(["init", "p"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"p already has {name}; nothing was written.\nTo fix:" in captured.err
    assert [path.name for path in Path("p").iterdir()] == [name]
    assert Path("p", name).read_text() == "mine"


def test_a_file_in_the_way_is_a_usage_error(capsys):
    Path("p").write_text("mine")
    assert run(["init", "p"]) == 2
    assert "p is a file" in capsys.readouterr().err
    assert run(["init", "p/q"]) == 2
    assert "To fix:" in capsys.readouterr().err
    assert run(["init"]) == 2


def test_the_project_is_short_valid_and_free_of_findings():
    assert run(["init", "p"]) == 0
    assert sum(len(path.read_text().splitlines()) for path in Path("p").iterdir()) <= 100
    assert "# Edit" in Path("p/model.py").read_text()
    assert "# Edit" in Path("p/data.py").read_text()
    for path in Path("p").glob("*.py"):
        ast.parse(path.read_text())
    assert lint_paths(["p"]).findings == []
    assert run(["config", "validate", "p/config.yaml"]) == 0
    assert load_config("p/config.yaml").loop.max_steps == 300


def test_the_project_trains_as_generated(tmp_path):
    assert run(["init", "p"]) == 0
    done = program("-m", "safetrain", "fit", "config.yaml", "--out", "out", "--strict", cwd=tmp_path / "p")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "p/out/summary.json").read_text())
    assert summary["steps"] == 300
    assert summary["final_loss"] < 0.35
    # From elsewhere as well: targets are relative to the config file.
    done = program("-m", "safetrain", "fit", "p/config.yaml", "loop.max_steps=2", "--out", "other", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_project_s_own_test_passes_as_generated(tmp_path):
    assert run(["init", "p"]) == 0
    done = program("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", cwd=tmp_path / "p")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert not Path("p/runs").exists()
