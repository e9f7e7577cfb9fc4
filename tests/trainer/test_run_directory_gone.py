"""Files of a run that are removed while it is training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain import SafeTrainer
from safetrain.errors import RunDirectoryError

Make = Callable[..., SafeTrainer]
CONFIG = {"checkpoint": {"every_steps": 3}, "loop": {"device": "cpu"}}


def data() -> list[Any]:
    return [(torch.ones(2, 6) * n, torch.ones(2, 1)) for n in range(12)]


class Removing(SafeTrainer):
    remove: Callable[[Path], object] = shutil.rmtree

    def on_commit(self, view: Any) -> None:
        if view.step == 4:
            type(self).remove(self.run.dir)


def test_a_removed_directory_is_made_again_and_said(make_trainer: Make, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert make_trainer(cls=Removing, train_data=data(), run_dir=run_dir, config=CONFIG).fit().status == "done"
    lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    assert any("was removed while training" in line.get("text", "") for line in lines)
    assert [line["step"] for line in lines if line["event"] == "step"][-1] == 11
    config = {**CONFIG, "loop": {"device": "cpu", "max_epochs": 2}}
    assert make_trainer(train_data=data(), run_dir=run_dir, config=config).fit(resume=True).steps == 24


def test_a_removed_lock_is_taken_again(make_trainer: Make, tmp_path: Path) -> None:
    class Unlocking(Removing):
        remove = staticmethod(lambda directory: (directory / ".lock").unlink())

    result = make_trainer(cls=Unlocking, train_data=data(), run_dir=tmp_path / "run", config=CONFIG).fit()
    assert (result.status, (tmp_path / "run" / ".lock").exists()) == ("done", True)


@pytest.mark.parametrize("name", ["config.yaml", "journal.jsonl"])
def test_a_removed_file_of_the_run_is_made_again_and_said(name: str, make_trainer: Make, tmp_path: Path) -> None:
    class Untidy(Removing):
        remove = staticmethod(lambda directory: (directory / name).unlink())

    run_dir = tmp_path / "run"
    make_trainer(cls=Untidy, train_data=data(), run_dir=run_dir, config=CONFIG).fit()
    assert f"made again: {name}" in (run_dir / "journal.jsonl").read_text()
    config = {**CONFIG, "loop": {"device": "cpu", "max_epochs": 2}}
    assert make_trainer(train_data=data(), run_dir=run_dir, config=config).fit(resume=True).steps == 24


def test_a_second_writer_is_noticed(make_trainer: Make, tmp_path: Path) -> None:
    """Another process has taken the directory after its lock was removed."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('ready', flush=True); sys.stdin.read()"
    others: list[subprocess.Popen[str]] = []

    class Taken(Removing):
        @staticmethod
        def remove(directory: Path) -> None:
            os.unlink(directory / ".lock")
            command = [sys.executable, "-c", code, str(directory / ".lock")]
            others.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert others[0].stdout is not None
            assert others[0].stdout.readline() == "ready\n"

    try:
        with pytest.raises(RunDirectoryError, match="another process too, since"):
            make_trainer(cls=Taken, train_data=data(), run_dir=tmp_path / "run", config=CONFIG).fit()
    finally:
        others[0].communicate("")


def test_half_written_files_of_a_killed_process_are_removed(make_trainer: Any, tmp_path: Path) -> None:
    bundle = tmp_path / "run" / "incidents" / "step-000001"
    bundle.mkdir(parents=True)
    left_over = [tmp_path / "run" / ".config.yaml.123.tmp", bundle / ".replay.pt.123.tmp"]
    kept = [tmp_path / "run" / ".my.tmp", tmp_path / "run" / "config.yaml.123.tmp"]
    for path in (*left_over, *kept):
        path.write_text("half")
    make_trainer(train_data=[(torch.ones(2, 6), torch.ones(2, 1))], run_dir=tmp_path / "run").fit()
    assert not any(path.exists() for path in left_over)
    assert all(path.exists() for path in kept)
