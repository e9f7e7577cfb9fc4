"""`safetrain check`: exit codes, choice of checks, JSON, and nothing left behind."""

import json
from pathlib import Path

import pytest

from safetrain.cli.main import run
from safetrain.preflight import CHECKS

MODULE = "parts_for_check"
PARTS = """
import torch

class Data(torch.utils.data.Dataset):
    def __init__(self, nan=(), size=64, fail=False, shout=False):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()
        self.x[list(nan), 1] = torch.nan
        self.fail, self.shout = fail, shout
        if fail:
            raise EOFError("short file")
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        if self.shout:
            print("reading", index)
        return self.x[index], self.y[index]

class Net(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    def forward(self, x):
        return self.layers(x)
"""
CONFIG = """
seed: 0
model: {_target_: './parts_for_check.py:Net'}
loss: {_target_: torch.nn.CrossEntropyLoss}
data: {train: {_target_: './parts_for_check.py:Data'}, batch_size: 8}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loop: {max_steps: 16, device: cpu}
"""


def files():
    return sorted(str(path) for path in Path().rglob("*") if "__pycache__" not in path.parts)


def test_a_healthy_config_passes_and_leaves_no_file(capsys):
    before = files()
    assert run(["check", "c.yaml", "--budget", "30"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if not line.startswith(" ")]
    assert [line.split()[1] for line in lines[:-1]] == [each.name for each in CHECKS]
    assert all(line[:4] in ("PASS", "SKIP") for line in lines[:-1])
    assert lines[-1].startswith("c: ")
    assert "\x1b" not in text
    assert files() == before


def test_a_failure_is_shown_with_its_fix_and_exit_code_3(capsys):
    arguments = ["check", "c.yaml", "data.train.nan=[5,40]", "--only", "labels,data_finite"]
    assert run(arguments) == 3
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if not line.startswith(" ")]
    assert [line.split()[:2] for line in lines] == [["FAIL", "data_finite"], ["PASS", "labels"], ["c:", "1"]]
    assert "field '0' has NaN in 2 of 64 samples" in " ".join(text.split())
    assert "fix: fill it in where the data is read" in " ".join(text.split())
    assert lines[-1].startswith("c: 1 passed, 1 failed in ")
    assert run([*arguments, "-q"]) == 3
    text = capsys.readouterr().out
    assert "PASS" not in text
    assert "FAIL  data_finite" in text


def test_json_is_one_object_whatever_user_code_prints(capsys):
    arguments = ["check", "c.yaml", "data.train.nan=[5]", "data.train.shout=true", "--json", "--only"]
    assert run([*arguments, "data_finite,initial_loss,resume"]) == 3
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert "reading 5" in captured.err
    assert (report["schema"], report["name"], report["passed"]) == (1, "c", False)
    assert report["counts"] == {"PASS": 2, "WARN": 0, "FAIL": 1, "SKIP": 0}
    found = {checked["name"]: checked for checked in report["checks"]}
    assert found.keys() == {"data_finite", "initial_loss", "resume"}
    assert found["data_finite"]["numbers"]["samples"] == ["5"]
    assert found["data_finite"]["fix"]
    assert found["initial_loss"]["numbers"]["expected"] == pytest.approx(0.6931, abs=1e-4)


def test_a_fix_for_the_learning_rate_can_be_pasted(capsys):
    assert run(["check", "c.yaml", "optimizer.lr=3e4", "--only", "learning_rate", "--json"]) == 3
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    override = found["fix"].rpartition(" ")[2]
    assert override.startswith("optimizer.lr=")
    assert run(["check", "c.yaml", override, "--only", "learning_rate"]) == 0


def test_mistakes_in_the_call_exit_with_2(capsys):
    assert run(["check", "c.yaml", "--only", "lables"]) == 2
    assert "there is no check 'lables', did you mean 'labels'?" in capsys.readouterr().err
    assert run(["check"]) == 2
    assert run(["check", "c.yaml", "optimizer.lrr=1"]) == 2
    assert run(["check", "c.yaml", "--budget", "0"]) == 2


def test_an_exception_while_building_exits_with_1(capsys):
    assert run(["check", "c.yaml", "data.train.fail=true"]) == 1
    assert "EOFError: short file" in capsys.readouterr().err


def test_the_list_of_checks(capsys):
    assert run(["check", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [each.name for each in CHECKS]
