"""`safetrain replay`: the recorded step happens again, and a bundle cannot run what is not of this project."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

from safetrain.cli.main import run
from safetrain.core.files import to_json

MODULE = "parts_for_replay"
PARTS = """
from dataclasses import dataclass
import torch
from torch import nn
from safetrain import SafeTrainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.dropout(self.norm(x)))

@dataclass
class Example:
    x: torch.Tensor
    scale: float

class Data(torch.utils.data.Dataset):
    def __init__(self, bad=(9,)):
        self.bad = set(bad)
    def __len__(self):
        return 24
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, generator=generator), torch.tensor(0.0 if index in self.bad else 1.0)

class Examples:
    def __iter__(self):
        for index in range(4):
            generator = torch.Generator().manual_seed(index)
            yield Example(torch.randn(4, 3, generator=generator), 0.0 if index == 2 else 1.0)

def loss(model, batch):
    x, scale = batch
    rates = model(x).square().sum(1)
    rates = rates * scale
    return torch.log(rates).mean()

def example_loss(model, batch):
    return torch.log(model(batch.x).square().sum(1) * batch.scale).mean()

class Mine(SafeTrainer):
    def training_step(self, model, batch):
        return loss(model, batch) * 2
"""
CONFIG = """
seed: 0
model: {_target_: './parts_for_replay.py:Net'}
loss: {_target_: './parts_for_replay.py:loss'}
data: {train: {_target_: './parts_for_replay.py:Data'}, batch_size: 4, shuffle: false}
loop: {max_epochs: 1, device: cpu}
logging: {tensorboard: false, console: 'off'}
"""


def fit(*arguments):
    assert run(["fit", "c.yaml", "--out", "out", *arguments]) == 0
    (bundle,) = Path("out/incidents").iterdir()
    return bundle


def window_of(bundle):
    """The inputs of its only micro-batch, and scales that are all fine."""
    x, scale = torch.load(bundle / "replay.pt", weights_only=True)["window"][0]
    return x.clone(), torch.ones_like(scale)


def change(bundle, name, value):
    contents = torch.load(bundle / "replay.pt", weights_only=True)
    torch.save({**contents, name: value}, bundle / "replay.pt")


def test_the_step_is_reproduced_with_its_weights_buffers_and_dropout(capsys):
    bundle = fit("loop.max_epochs=3", "recovery.heal=[]", "data.train.bad=[21]", "forensics.max_incidents=1")
    assert run(["replay", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("REPLAY of step 5: reproduced\n")
    labels = ("WHY", "INPUTS", "SAMPLES       1", "FIX", "Verified", "REPLAY        reproduced, twice")
    assert all(label in text for label in ("FIRST BAD OP  log", *labels)), text
    assert ">" in text
    assert "    40  rates = rates * scale\n" in text
    assert "example_loss" not in text  # which is another function
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_json(capsys):
    bundle = fit()
    capsys.readouterr()
    assert run(["replay", str(bundle), "--json", "--no-remedies"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["differences"]) == ("reproduced", [])
    recorded = json.loads((bundle / "incident.json").read_text())
    assert result["incident"]["origin"] == recorded["origin"]
    assert result["incident"]["samples"] == recorded["samples"] == [1]
    assert result["incident"]["remedies"] == []


def test_a_step_that_is_healthy_now_is_not_reproduced(capsys):
    bundle = fit()
    change(bundle, "window", [window_of(bundle)])
    assert run(["replay", str(bundle)]) == 3
    assert "not reproduced" in capsys.readouterr().out


def test_another_origin_or_loss_is_different(capsys):
    bundle = fit()
    x, scale = window_of(bundle)
    x[3, 0] = float("nan")
    change(bundle, "window", [(x, scale)])
    assert run(["replay", str(bundle)]) == 3
    text = capsys.readouterr().out
    assert "REPLAY of step 2: different" in text
    assert "phase: data now, forward recorded" in text


def test_a_finite_incident_is_reproduced_when_its_loss_is_the_same_to_the_bit(capsys):
    bundle = fit()
    recorded = json.loads((bundle / "incident.json").read_text())
    recorded["trigger"] = {"guard": "spike", "signal": "loss", "value": 7.5}
    recorded["origin"]["phase"] = "unknown"
    (bundle / "incident.json").write_text(json.dumps(recorded))
    change(bundle, "window", [window_of(bundle)])
    assert run(["replay", str(bundle), "--json"]) == 3  # another loss
    assert "bit for bit" in capsys.readouterr().out
    change(bundle, "loss", None)
    assert run(["replay", str(bundle)]) == 0


def test_a_trainer_of_ones_own_and_a_batch_of_ones_own_class(capsys):
    bundle = fit("trainer._target_=./parts_for_replay.py:Mine", "~loss")
    assert run(["replay", str(bundle)]) == 0
    shutil.rmtree("out")
    bundle = fit(
        "data.train._target_=./parts_for_replay.py:Examples",
        "loss._target_=./parts_for_replay.py:example_loss",
        "recovery.heal=[]",
    )
    window = torch.load(bundle / "replay.pt", weights_only=True)["window"]
    assert window[0]["class"].endswith("parts_for_replay.py:Example")
    assert run(["replay", str(bundle)]) == 0, capsys.readouterr()


def test_half_precision_and_several_micro_batches():
    bundle = fit("loop.grad_accum=2", "loop.precision=bf16", "recovery.ladder=[skip]")
    contents = torch.load(bundle / "replay.pt", weights_only=True)
    assert (len(contents["window"]), contents["precision"], contents["loss"]) == (2, "bf16", None)
    assert run(["replay", str(bundle)]) == 0


def test_a_run_made_in_python_says_what_to_do(capsys):
    from safetrain import SafeTrainer
    from safetrain.incidents.bundle import read_bundle
    from safetrain.incidents.replay import replay

    model = torch.nn.Linear(3, 3)
    batches = [(torch.ones(2, 3), torch.tensor([1.0, float(i != 2)])) for i in range(4)]

    def loss_fn(model, batch):
        return torch.log(model(batch[0]).square().sum(1) * batch[1]).mean()

    config = {"loop": {"device": "cpu"}, "logging": {"console": "off", "tensorboard": False}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = SafeTrainer(model, loss_fn=loss_fn, optimizer=optimizer, train_data=batches, config=config, run_dir="out")
    trainer.fit()
    bundle = "out/incidents/step-000002"
    assert run(["replay", bundle]) == 2
    text = capsys.readouterr().err
    assert "names no model and no loss" in text
    assert "model._target_=./file.py:Model loss._target_=./file.py:Loss" in text
    assert "from safetrain.replaying import replay" in text
    assert replay(read_bundle(bundle), torch.nn.Linear(3, 3), loss_fn, optimizer).verdict == "reproduced"
    with pytest.raises(Exception, match="do not fit this model"):
        replay(read_bundle(bundle), torch.nn.Linear(4, 3), loss_fn)


# ---- what may run --------------------------------------------------------------------------------------------------


def elsewhere(text):
    """A source file outside the project that leaves a trace when it is executed."""
    path = Path("..") / "elsewhere" / "evil_for_replay.py"
    path.parent.mkdir()
    path.write_text(f"open({str(Path('trace').absolute())!r}, 'w').close()\n{text}")
    return path.resolve()


def retarget(old, new):
    config = Path("out/config.yaml")
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))


def test_code_from_elsewhere_runs_only_with_trust(capsys):
    bundle = fit()
    evil = elsewhere(PARTS)
    here = str(Path("parts_for_replay.py").absolute())
    retarget(f"{here}:Net", f"{evil}:Net")
    assert run(["replay", str(bundle)]) == 2
    text = capsys.readouterr().err
    assert f"- {evil}:Net" in text
    assert "add --trust" in text
    assert not Path("trace").exists()
    assert run(["replay", str(bundle), "--trust"]) == 0
    assert Path("trace").exists()


def test_an_installed_function_is_not_called(capsys):
    bundle = fit()
    retarget(f"_target_: {Path('parts_for_replay.py').absolute()}:Net", "_target_: os.mkdir\n  path: made")
    assert run(["replay", str(bundle)]) == 2
    assert "  - os.mkdir\n" in capsys.readouterr().err
    assert not Path("made").exists()


def test_a_run_cannot_bring_its_code_along():
    bundle = fit()
    evil = elsewhere(PARTS)
    brought = Path("out/evil_for_replay.py").absolute()
    shutil.copy(evil, brought)
    retarget(f"{Path('parts_for_replay.py').absolute()}:Net", f"{brought}:Net")
    assert run(["replay", str(bundle)]) == 2
    Path("link.py").symlink_to(evil)
    retarget(f"{brought}:Net", f"{Path('link.py').absolute()}:Net")
    assert run(["replay", str(bundle)]) == 2
    assert not Path("trace").exists()


def test_a_batch_cannot_name_a_class_from_elsewhere(capsys):
    bundle = fit()
    evil = elsewhere("class Batch: ...\n")
    empty = {"is_new": True, "arguments": [], "state": None, "items": None, "pairs": None}
    change(bundle, "window", [{"__safetrain__": "object", "class": f"{evil}:Batch", **empty}])
    assert run(["replay", str(bundle)]) == 2
    assert "was not imported" in capsys.readouterr().err
    assert not Path("trace").exists()


PIPES = "torch.utils.data.datapipes.iter"


@pytest.mark.parametrize(
    "target",
    [
        # a pickle beside the run, opened and decoded by data pipes that a layer iterates over
        f"""torch.nn.ModuleList
  modules:
    _target_: {PIPES}.RoutedDecoder
    datapipe: {{_target_: {PIPES}.FileOpener, datapipe: [out/x.pickle], mode: rb}}""",
        "out.evil_for_replay.Net",
        "sub.out.evil_for_replay.Net",
        "./sub/evil_for_replay.py:Net",
        "sub.evil_for_replay.Net",
    ],
)
def test_no_way_in_for_the_code_of_a_run_from_elsewhere(target):
    bundle = fit()
    evil = elsewhere(PARTS)
    Path("out/x.pickle").write_bytes(pickle.dumps(Trap(os.mkdir, "trapped")))
    shutil.copytree("out", "sub/out")  # unpacked below the current directory
    for place in ("out", "sub", "sub/out"):
        shutil.copy(evil, place)
    retarget(f"{Path('parts_for_replay.py').absolute()}:Net", target)
    shutil.copy("out/config.yaml", "sub/out/config.yaml")
    for where in (bundle, Path("sub") / bundle):
        assert run(["replay", str(where)]) == 2
    assert not Path("trace").exists()
    assert not Path("trapped").exists()


def test_data_pipes_in_a_batch_are_not_made(capsys):
    bundle = fit()
    Path("x.pickle").write_bytes(pickle.dumps(Trap(os.mkdir, "trapped")))
    made = {"__safetrain__": "object", "is_new": False, "state": None, "items": None, "pairs": None}
    opener = {**made, "class": f"{PIPES}.FileOpener", "arguments": [["x.pickle"], "rb"]}
    change(bundle, "window", [{**made, "class": "list", "arguments": [opener]}])
    assert run(["replay", str(bundle)]) == 2
    assert "not a class of the current project" in capsys.readouterr().err
    assert not Path("trapped").exists()


def test_a_part_that_the_user_names_on_the_command_line_is_the_users(capsys):
    bundle = fit()
    elsewhere(PARTS)
    Path("out/config.yaml").write_text(Path("out/config.yaml").read_text().replace("name: c", "name: changed"))
    assert run(["replay", str(bundle)]) == 2
    assert "made elsewhere" in capsys.readouterr().err
    typed = ["model._target_=../elsewhere/evil_for_replay.py:Net", "loss._target_=../elsewhere/evil_for_replay.py:loss"]
    assert run(["replay", str(bundle), *typed]) in (0, 3)


class Trap:
    def __init__(self, act, *arguments):
        self._reduced = (act, arguments)

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize("writer", [torch.save, lambda value, path: Path(path).write_bytes(pickle.dumps(value))])
@pytest.mark.parametrize("flags", [[], ["--trust"]])
def test_a_malicious_pickle_runs_nothing(writer, flags, capsys):
    bundle = fit()
    writer({"schema": 1, "window": Trap(os.mkdir, "trapped")}, bundle / "replay.pt")
    assert run(["replay", str(bundle), *flags]) == 2
    assert "nothing of it was run" in capsys.readouterr().err
    assert not Path("trapped").exists()


def test_what_is_not_a_bundle_is_said(capsys):
    bundle = fit()
    assert run(["replay", "out"]) == 2
    assert "not an incident's directory" in capsys.readouterr().err
    (bundle / "replay.pt").rename(bundle / "moved")
    assert run(["replay", str(bundle)]) == 2
    assert "has no replay.pt" in capsys.readouterr().err
    (bundle / "moved").rename(bundle / "replay.pt")
    change(bundle, "schema", 99)
    assert run(["replay", str(bundle)]) == 2
    change(bundle, "schema", 1)
    Path("out/config.yaml").rename("out/elsewhere.yaml")
    assert run(["replay", str(bundle)]) == 2
    assert "config.yaml is missing" in capsys.readouterr().err
    (bundle / "incident.json").write_text(to_json({"schema": 7}))
    assert run(["replay", str(bundle)]) == 2
    assert "its schema is 7" in capsys.readouterr().err


def test_an_exception_in_user_code_exits_with_1(capsys):
    bundle = fit()
    source = Path("parts_for_replay.py")
    source.write_text(
        source.read_text().replace("        self.norm = nn.BatchNorm1d(3)", "        raise KeyError('no')")
    )
    del sys.modules["parts_for_replay"]
    assert run(["replay", str(bundle)]) == 1
    assert "KeyError: 'no'" in capsys.readouterr().err
