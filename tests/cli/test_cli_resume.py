"""`safetrain resume`, `fit --resume auto` and `export`: what they do, refuse and exit with."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from records import journal
from safetensors.torch import load_file, load_model
from small import assert_same

from safetrain import load_config
from safetrain.checkpoint.compatibility import check_changes
from safetrain.cli.main import run

MODULE = "parts_for_resume"
PARTS = """
import os, signal
import torch
from safetrain import SafeTrainer

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        x = torch.arange(3.0) + index / 24
        return x, x.sum()[None]

class Net(torch.nn.Sequential):
    def __init__(self, width=8):
        super().__init__(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))

class Mine(SafeTrainer):
    def on_commit(self, view):
        signals = {"term": [signal.SIGTERM], "int": [signal.SIGINT], "twice": [signal.SIGTERM] * 2, "kill": [signal.SIGKILL],
            "both": [signal.SIGTERM, signal.SIGINT], "hangup": [signal.SIGHUP] * 2, "slurm": [signal.SIGUSR1, signal.SIGTERM],
            "limit": [signal.SIGUSR2]}
        if view.step == 5:
            for number in signals.get(os.environ.get("SIGNAL"), []):
                os.kill(os.getpid(), number)
"""
CONFIG = """
seed: 0
trainer: {_target_: './parts_for_resume.py:Mine'}
model: {_target_: './parts_for_resume.py:Net'}
loss: {_target_: torch.nn.MSELoss}
data: {train: {_target_: './parts_for_resume.py:Data'}, eval: {_target_: './parts_for_resume.py:Data'}, batch_size: 4}
loop: {max_steps: 16, device: cpu, ema: 0.9}
checkpoint: {every_steps: 3}
logging: {tensorboard: false}
"""


def fit(*arguments):
    return run(["fit", "c.yaml", "-q", *arguments])


def in_process(*arguments, **environment):
    code = "import sys, torch; torch.set_num_threads(1); from safetrain.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, timeout=120, check=False).returncode


def steps_of(run_dir):
    return [line["step"] for line in journal(Path(run_dir)) if line["event"] == "step"]


@pytest.mark.parametrize(
    ("sent", "code", "newest"),
    [
        ("term", 143, 6),
        ("int", 130, 6),
        ("twice", -signal.SIGTERM, 3),
        ("kill", -signal.SIGKILL, 3),
        ("both", 143, 6),
        ("hangup", 129, 6),
        ("slurm", 138, 6),
        ("limit", 140, 6),
    ],
)
def test_a_signal_and_a_resume_end_where_an_uninterrupted_run_ends(sent, code, newest):
    assert fit("--out", "whole") == 0
    assert in_process("fit", "c.yaml", "-q", "--out", "pieces", SIGNAL=sent) == code
    assert max(Path("pieces/checkpoints").glob("step-????????")).name == f"step-{newest:08d}"
    assert run(["resume", "pieces"]) == 0
    for name in ("final.safetensors", "final_ema.safetensors"):
        assert Path("whole/checkpoints", name).read_bytes() == Path("pieces/checkpoints", name).read_bytes()
    assert steps_of("pieces") == steps_of("whole") == list(range(16))


def test_a_signal_that_the_program_ignores_or_that_is_not_asked_for_ends_nothing():
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    code = f"{ignored}from safetrain.cli.main import main; import sys; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "fit", "c.yaml", "-q", "--out", "run"]
    assert subprocess.run(command, env={**os.environ, "SIGNAL": "hangup"}, timeout=120, check=False).returncode == 0
    unasked = in_process("fit", "c.yaml", "-q", "--out", "other", "loop.end_on_signals=[SIGHUP]", SIGNAL="limit")
    assert unasked == -signal.SIGUSR2


def test_fit_resume_auto_starts_continues_and_needs_a_directory(capfd):
    assert in_process("fit", "c.yaml", "-q", "--out", "run", "--resume", "auto", SIGNAL="kill") == -signal.SIGKILL
    assert fit("--out", "run", "--resume", "auto") == 0
    assert steps_of("run") == list(range(16))
    assert fit("--resume", "auto") == 2
    assert "needs --out" in capfd.readouterr().err


def test_changes_are_applied_refused_or_forced(capfd):
    assert fit("--out", "run") == 0
    assert run(["resume", "run", "loop.max_steps=20", "checkpoint.keep_last=1"]) == 0
    assert steps_of("run") == list(range(20))
    assert run(["resume", "run", "data.batch_size=6", "model.width=9"]) == 2
    text = capfd.readouterr().err
    assert "data.batch_size: 4 -> 6" in text
    assert "model.width: None -> 9" in text
    assert run(["resume", "run", "data.batch_size=6", "loop.max_steps=22", "--force"]) == 0
    assert run(["resume", "run", "model.width=9", "--force"]) == 2
    assert "does not fit this model" in capfd.readouterr().err
    assert run(["resume", "run", "loop.max_steps=23"]) == 0  # what failed has changed nothing
    assert steps_of("run") == list(range(23))


@pytest.mark.parametrize("which", ["best", "last", "ema"])
def test_exported_weights_load_into_the_plain_model(which, capfd):
    assert fit("--out", "run") == 0
    assert run(["export", "run", "out/weights.safetensors", "--which", which]) == 0
    assert which in capfd.readouterr().out
    sys.path.insert(0, ".")
    from parts_for_resume import Net

    model = Net()
    model.load_state_dict(load_file("out/weights.safetensors"))
    assert load_model(Net(), "out/weights.safetensors") == (set(), [])
    if which != "best":
        name = "final_ema.safetensors" if which == "ema" else "final.safetensors"
        assert_same(dict(model.state_dict()), {k: load_file(f"run/checkpoints/{name}")[k] for k in model.state_dict()})


def test_a_file_is_replaced_only_if_that_is_asked_for(capfd):
    assert fit("--out", "run") == 0
    Path("mine.safetensors").write_text("precious")
    assert run(["export", "run", "mine.safetensors"]) == 2
    assert "--force" in capfd.readouterr().err
    assert Path("mine.safetensors").read_text() == "precious"
    assert run(["export", "run", "mine.safetensors", "--force"]) == 0
    assert load_file("mine.safetensors")


def test_what_cannot_be_exported_is_an_error_and_writes_nothing(capfd):
    assert fit("--out", "run", "loop.ema=null", "data.eval=null") == 0
    assert run(["export", "run", "x.safetensors", "--which", "ema"]) == 2
    assert run(["export", "run", "x.safetensors", "--which", "best"]) == 2
    for path in Path("run/checkpoints").glob("step-*"):
        (path / "model.safetensors").write_bytes(b"damaged")
    assert run(["export", "run", "x.safetensors"]) == 2
    text = capfd.readouterr().err
    assert "no moving average" in text
    assert "no best checkpoint" in text
    assert "model.safetensors has 7 bytes" in text
    assert not Path("x.safetensors").exists()


def test_a_run_in_use_by_another_process_is_refused(capfd):
    assert fit("--out", "run") == 0
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        assert run(["resume", "run", "loop.max_steps=17"]) == 2
        assert f"is being written to by process {holder.pid} on" in capfd.readouterr().err
    finally:
        holder.kill()
        holder.communicate()
    assert run(["resume", "run", "loop.max_steps=17"]) == 0  # the lock of a killed process holds nobody up


HOLD = """
import sys
from pathlib import Path
from safetrain.core.rundir import RunLock
lock = RunLock(Path("run"))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_forced_change_of_what_is_in_the_saved_state_is_reported():
    before, after = (load_config({"optimizer": {"_target_": "torch.optim.SGD", "lr": lr}}) for lr in (0.1, 0.5))
    after.loop.max_steps = 7
    assert check_changes(before, after, force=True) == [
        "optimizer.lr: 0.1 -> 0.5 (not applied: the saved state has its own value)",
        "loop.max_steps: None -> 7",
    ]


def test_a_run_that_becomes_longer_than_its_schedule_is_warned_about():
    schedule = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 20}
    before, after = (load_config({"scheduler": schedule, "loop": {"max_steps": steps}}) for steps in (20, 30))
    lengthened, schedule_is_over = check_changes(before, after, force=False)
    assert lengthened == "loop.max_steps: 20 -> 30"
    assert schedule_is_over.startswith("scheduler.T_max is still 20")
    assert check_changes(after, before, force=False) == ["loop.max_steps: 30 -> 20"]
