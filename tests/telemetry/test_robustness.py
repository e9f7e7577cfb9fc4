"""Nothing that is only told about a run can end it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain import SafeTrainer
from safetrain.checkpoint import CheckpointStore

Make = Callable[..., SafeTrainer]
SCRIPT = """
import sys, torch
from safetrain.cli.main import main
main(["fit", "c.yaml", "--out", "run"])
"""
CONFIG = """
seed: 0
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
loss: {_target_: torch.nn.MSELoss}
data: {train: {_target_: './parts.py:Data'}, batch_size: 2}
loop: {max_steps: 6, device: cpu, log_every: 1}
logging: {tensorboard: false}
"""
PARTS = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, index): return torch.ones(2) * index, torch.ones(1)
"""


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["> /dev/full", ">&-", ">&- 2>&-", "| true", "> /dev/full 2>&1"])
def test_standard_output_may_be_full_or_closed(tmp_path: Path, how: str) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "main.py").write_text(SCRIPT)
    command = f"set -o pipefail; {sys.executable} main.py {how}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = events(tmp_path / "run")
    assert [line["step"] for line in told if line["event"] == "step"] == list(range(6))
    assert told[-1]["event"] == "end"
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load_newest() is not None


def test_a_directory_that_is_not_utf_8(make_trainer: Make, tmp_path: Path) -> None:
    run_dir = tmp_path / os.fsdecode(b"run-\xff")
    data = [(torch.ones(2, 6), torch.ones(2, 1) * (float("nan") if n == 2 else 1)) for n in range(4)]
    result = make_trainer(train_data=data, run_dir=run_dir, config={"logging": {"console": "plain"}}).fit()
    assert result.status == "done"
    assert events(run_dir)[-1]["event"] == "end"
    assert (run_dir / "incidents" / "step-000002" / "report.md").exists()
    make_trainer(train_data=data, run_dir=run_dir, config={"loop": {"max_epochs": 2}}).fit(resume=True)


def test_a_file_system_that_cannot_fsync(make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    result = make_trainer(train_data=[(torch.ones(2, 6), torch.ones(2, 1))] * 4).fit()
    assert result.status == "done"
    assert result.checkpoints["verified"]


class WriteOnly:
    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("output", [lambda: None, closed, WriteOnly], ids=["none", "closed", "knows only to write"])
def test_standard_output_may_be_any_object(
    output: Callable[[], Any], make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", output())
    data = [(torch.ones(2, 6), torch.ones(2, 1) * (float("nan") if n == 2 else 1)) for n in range(4)]
    result = make_trainer(train_data=data, config={"logging": {"console": "auto"}}).fit()
    monkeypatch.undo()
    assert result.status == "done"
    assert events(result.run_dir)[-1]["event"] == "end"
