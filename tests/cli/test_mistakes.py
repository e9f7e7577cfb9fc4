"""Ten typical mistakes: each is answered in at most ten lines that say what to do, from the command line and from Python."""

import os
import re
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from safetrain import SafeTrainer, load_config
from safetrain.cli.main import run
from safetrain.errors import ConfigError, LossError, RunDirectoryError, SafetrainError, UsageError

MODULE = "mistaken_parts"
PARTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)

class Raising(Net):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x.reshape(7, -1)  # does not fit

class Points(torch.utils.data.Dataset):
    def __init__(self, path=None):
        self.x = torch.randn(8, 3) if path is None else torch.tensor([float(line) for line in open(path)])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)

def per_sample(model, batch):
    return (model(batch[0]) - batch[1]) ** 2
"""
CONFIG = """
model: {_target_: './mistaken_parts.py:Net', width: 8}
data: {train: {_target_: './mistaken_parts.py:Points'}, batch_size: 4}
loss: {_target_: torch.nn.MSELoss}
loop: {max_epochs: 1, device: cpu}
logging: {console: 'off', tensorboard: false}
"""


OURS = {
    # mistake: (arguments of the command, type in Python, what the message says, what it advises)
    "wrong key": (["loop.max_stesp=3"], ConfigError, "loop.max_stesp: unknown key", "did you mean 'max_steps'?"),
    "wrong type": (["loop.max_epochs=many"], ConfigError, "'many' is not accepted", "give an integer"),
    "wrong path of a class": (
        ["model._target_=./nowhere.py:Net"],
        ConfigError,
        "there is no file",
        "correct the path (it is relative to the config file; on the command line, to the current directory)",
    ),
    "loss not scalar": (
        ["loss._target_=./mistaken_parts.py:per_sample"],
        LossError,
        "a loss of shape (4, 1)",
        "To fix: return loss.mean()",
    ),
    "device not there": (
        ["loop.device=cuda:7"],
        UsageError,
        "loop.device is 'cuda:7', which this machine cannot use",
        "To fix: use loop.device=auto, or cpu.",
    ),
}


def is_short(message):
    lines = message.strip().splitlines()
    assert len(lines) <= 10, message
    assert max(map(len, lines)) <= 400, message
    return True


@pytest.mark.parametrize("mistake", OURS)
def test_a_mistake_in_the_config(mistake, capfd):
    overrides, kind, problem, advice = OURS[mistake]
    assert run(["fit", "c.yaml", *overrides]) == 2
    message = capfd.readouterr().err
    assert problem in message
    assert advice in message
    assert "Traceback" not in message
    assert is_short(message)
    with pytest.raises(SafetrainError) as raised:
        SafeTrainer(config=load_config("c.yaml", overrides)).fit()
    assert isinstance(raised.value, kind)
    assert advice in str(raised.value)


def test_the_wrong_path_of_a_config(capfd):
    assert run(["fit", "d.yaml"]) == 2
    message = capfd.readouterr().err
    assert "'d.yaml' is neither a file nor a recipe; did you mean 'c.yaml'?" in message
    assert is_short(message)
    with pytest.raises(ConfigError, match="give the path of a YAML file, or a recipe: char_gpt"):
        load_config("nothing_like_it.yaml")


def test_resuming_what_is_no_run(capfd):
    Path("empty").mkdir()
    for name, problem in (("empty", "holds no run"), ("nowhere", "does not exist")):
        assert run(["resume", name]) == 2
        message = capfd.readouterr().err
        assert problem in message
        assert "To fix: give the directory of the run to resume." in message
        assert is_short(message)
        with pytest.raises(RunDirectoryError, match="To fix"):
            SafeTrainer(config="c.yaml", run_dir=name).fit(resume=True)


def unwritable(tmp_path):
    """A directory that cannot be made: below a file, which stops root as well, or below one without permission."""
    if os.geteuid() == 0:
        (tmp_path / "a_file").write_text("")
        return tmp_path / "a_file" / "run"
    (tmp_path / "locked").mkdir(mode=0o500)
    return tmp_path / "locked" / "run"


def test_no_permission_to_write(tmp_path, capfd):
    directory = unwritable(tmp_path)
    assert run(["fit", "c.yaml", "--out", str(directory)]) == 2
    message = capfd.readouterr().err
    assert "the run directory cannot be made" in message
    assert "To fix: give a directory you can write to (--out or run_dir)." in message
    assert is_short(message)
    with pytest.raises(RunDirectoryError, match="To fix"):
        SafeTrainer(config="c.yaml", run_dir=directory).fit()


def test_a_port_that_is_in_use():
    """In processes of their own: what was set up for several of them stays for good."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        meeting = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        in_python = "from safetrain import SafeTrainer; SafeTrainer(config='c.yaml')"
        for command in (["-m", "safetrain", "fit", "c.yaml"], ["-c", in_python]):
            done = subprocess.run(
                [sys.executable, *command], env={**os.environ, **meeting}, capture_output=True, text=True, timeout=120
            )
            message = done.stderr[done.stderr.index(f"port {port}") :]
            assert f"port {port}, at which the processes of this run are to meet, is in use" in message
            assert "To fix: start it with another port" in message
            assert is_short(message)
            assert done.returncode == (2 if "-m" in command else 1)


def reported(capfd):
    """The traceback, and what is said after it."""
    trace, _, rest = capfd.readouterr().err.partition("\n\n")
    return trace, rest


def test_data_that_is_missing(capfd):
    assert run(["fit", "c.yaml", "data.train.path=missing.csv"]) == 1
    trace, message = reported(capfd)
    assert trace.splitlines()[-1] == "FileNotFoundError: [Errno 2] No such file or directory: 'missing.csv'"
    assert "mistaken_parts.py" in trace
    assert f"To fix: make sure that missing.csv exists, a relative path, looked up in {os.getcwd()}." in message
    assert is_short(message)
    with pytest.raises(FileNotFoundError, match=r"missing\.csv"):
        SafeTrainer(config=load_config("c.yaml", ["data.train.path=missing.csv"]))


def test_a_model_that_raises(capfd):
    assert run(["fit", "c.yaml", "model._target_=./mistaken_parts.py:Raising"]) == 1
    trace, message = reported(capfd)
    assert re.findall(r", in (\w+)", trace) == ["forward", "helper"]  # the user's own frames, and all of them
    assert "return x.reshape(7, -1)  # does not fit" in trace
    assert trace.splitlines()[-1] == "RuntimeError: shape '[7, -1]' is invalid for input of size 12"
    line = PARTS.splitlines().index("        return x.reshape(7, -1)  # does not fit") + 1
    assert f"mistaken_parts.py:{line}, in helper." in message
    assert message.splitlines()[-1] == "safetrain: the exception above was raised while training, at step 0"
    assert is_short(message)
    assert run(["fit", "c.yaml", "-v", "model._target_=./mistaken_parts.py:Raising"], verbose=True) == 1
    trace, message = reported(capfd)
    assert "in run_step" in trace  # no frame is left out
    assert "left out" not in message
    with pytest.raises(RuntimeError, match="is invalid for input") as raised:
        SafeTrainer(config=load_config("c.yaml", ["model._target_=./mistaken_parts.py:Raising"])).fit()
    assert raised.value.__cause__ is None
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "helper"


def test_what_led_to_an_exception_is_kept(capfd):
    chained = PARTS.replace(
        "        return x.reshape(7, -1)  # does not fit",
        "        try:\n            return x.reshape(7, -1)\n        except RuntimeError as error:\n"
        "            raise KeyError('no such shape') from error",
    )
    Path("mistaken_parts.py").write_text(chained)
    assert run(["fit", "c.yaml", "model._target_=./mistaken_parts.py:Raising"]) == 1
    text = capfd.readouterr().err
    assert "RuntimeError: shape '[7, -1]' is invalid" in text
    assert "The above exception was the direct cause" in text
    assert "KeyError: 'no such shape'" in text


def test_an_exception_late_in_a_run_says_how_to_go_on(capfd):
    Path("late.py").write_text(
        "from safetrain import SafeTrainer\n"
        "class Late(SafeTrainer):\n"
        "    def on_commit(self, view):\n"
        "        if view.step == 1:\n"
        "            raise ValueError('too late')\n"
    )
    assert run(["fit", "c.yaml", "--out", "run", "trainer._target_=./late.py:Late"]) == 1
    _, message = reported(capfd)
    assert "late.py:5, in on_commit" in message
    assert "Then go on from the last checkpoint: safetrain resume run" in message


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x[:, :2])


def test_nothing_of_ours_hides_an_exception_in_python(make_trainer):
    trainer = make_trainer(Wrong(), train_data=[(torch.randn(4, 3), torch.randn(4, 1))])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        trainer.fit()
    assert trainer.run.result.status == "error"
    assert any(frame.name == "forward" and frame.filename == __file__ for frame in traceback.extract_tb(raised.tb))


@pytest.mark.parametrize(
    "override",
    ["optimizer.lr=-1", "model={_target_: torch.nn.Linear, in_features: 5, out_features: 1}"],
    ids=["learning rate", "shapes"],
)
def test_what_torch_refuses_is_looked_for_in_the_config(override, capfd):
    code = run(["fit", "c.yaml", override])
    message = capfd.readouterr().err
    assert code == 1, message
    assert "check the arguments of model, data, loss, optimizer and scheduler" in message
