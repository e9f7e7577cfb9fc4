"""`safetrain fit`: what is trained, what is printed where, and every exit code."""

import json
import signal
from pathlib import Path

import pytest

from safetrain.cli.main import run
from safetrain.config import load_config

MODULE = "parts_for_cli"
PARTS = """
import os, signal
import torch
from safetrain import SafeTrainer

class Data(torch.utils.data.Dataset):
    def __init__(self, bad=(), fail="", size=12):
        self.bad, self.fail, self.size = set(bad), fail, size
        if fail == "build":
            raise KeyError("no such data")
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        if index == 8 and self.fail == "eof":
            raise EOFError("short file")
        if index == 8 and self.fail == "ctrl-c":
            raise KeyboardInterrupt
        if index == 8 and self.fail == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.full((3,), float("nan") if index in self.bad else 1.0 + index)

def loss(model, batch):
    return model(batch).pow(2).mean()

class Mine(SafeTrainer):
    def on_commit(self, view):
        print("mine", view.step)
"""
CONFIG = """
seed: 0
model: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
loss: {_target_: './parts_for_cli.py:loss'}
data: {train: {_target_: './parts_for_cli.py:Data'}, batch_size: 2, shuffle: false}
loop: {max_epochs: 1, log_every: 1, device: cpu}
logging: {tensorboard: false}
"""


def fit(*arguments):
    return run(["fit", "c.yaml", "--out", "out", *arguments])


def test_a_healthy_run_exits_with_0_and_leaves_a_run_directory(capfd):
    assert fit() == 0
    captured = capfd.readouterr()
    assert "loss" in captured.out
    assert load_config("out/config.yaml") == load_config("c.yaml")
    assert json.loads(Path("out/summary.json").read_text())["steps"] == 6


def test_flags_are_overrides(capfd):
    assert fit("--seed", "5", "--precision", "bf16", "--device", "cpu", "-q", "optimizer.lr=0.5", "~guards.clip") == 0
    assert capfd.readouterr().out == ""
    config = load_config("out/config.yaml")
    assert (config.seed, config.loop.precision, config.loop.device, config.optimizer["lr"]) == (5, "bf16", "cpu", 0.5)
    assert config.guards["clip"] is None
    assert (
        config.logging.console == load_config("c.yaml").logging.console
    )  # how this process prints is not for a resume


def test_fast_dev_run_is_five_steps():
    assert fit("--fast-dev-run", "-q") == 0
    assert json.loads(Path("out/summary.json").read_text())["steps"] == 5


def test_json_prints_json_lines(capfd):
    assert fit("--json") == 0
    lines = capfd.readouterr().out.splitlines()
    assert len([json.loads(line) for line in lines]) >= 6
    assert fit("--json", "--quiet") == 2


def test_a_trainer_of_ones_own(capfd):
    assert fit("-q", "trainer._target_=./parts_for_cli.py:Mine") == 0
    assert capfd.readouterr().out.splitlines() == [f"mine {step}" for step in range(6)]
    assert fit("trainer._target_=./parts_for_cli.py:Data") == 2
    assert "is not a SafeTrainer; derive it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("override", "said", "when"),
    [
        ("data.train.fail=build", "KeyError: 'no such data'", "while the model, the data and the optimizer were built"),
        (
            "data.train.fail=eof",
            "EOFError: short file",
            "while training, at step 4",
        ),  # which click would take for Ctrl-D
        ("trainer._target_=./broken_for_cli.py:T", "ZeroDivisionError", "while the trainer's own module was imported"),
    ],
)
def test_an_exception_of_user_code_exits_with_1_and_says_when(capfd, override, said, when):
    Path("broken_for_cli.py").write_text("class T: ...\n1 / 0\n")
    assert fit("-q", override) == 1
    text = capfd.readouterr().err
    assert "Traceback" in text
    assert "_for_cli.py" in text
    assert said in text
    assert text.splitlines()[-1] == f"safetrain: the exception above was raised {when}"


def test_config_usage_and_directory_errors_exit_with_2_without_a_traceback(capfd):
    assert fit("seed=x") == 2
    assert fit("data.train.size=0") == 2
    assert fit("-q", "data.train.size=12", "loop.max_epochs=1", "--out", "other") == 0
    assert fit("-q", "--out", "other") == 2
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert "override 'seed=x'" in text
    assert "already holds a run" in text


def test_verbose_shows_the_traceback_of_a_config_error(capfd):
    assert run(["fit", "c.yaml", "seed=x", "-v"], verbose=True) == 2
    assert "Traceback" in capfd.readouterr().err


def test_a_stopped_run_exits_with_4(capfd):
    assert fit("-q", "data.train.bad=[0,1,2,3,4,5]", "recovery.max_refusals=1") == 4
    text = capfd.readouterr().err
    assert "max_refusals" in text
    assert "Traceback" not in text


def test_survived_incidents_exit_with_5_only_under_strict():
    assert fit("-q", "data.train.bad=[4]", "--out", "a") == 0
    assert fit("-q", "data.train.bad=[4]", "--out", "b", "--strict") == 5
    assert fit("-q", "--out", "c", "--strict") == 0


def test_interrupts_exit_with_128_plus_the_signal():
    assert fit("-q", "data.train.fail=ctrl-c", "--out", "a") == 130
    handler = signal.getsignal(signal.SIGTERM)
    assert fit("-q", "data.train.fail=term", "--out", "b") == 143
    assert signal.getsignal(signal.SIGTERM) == handler
