"""`safetrain diagnose`: bad steps and samples of a config without training, and the incidents of a run."""

import json
from pathlib import Path

from safetrain.cli.main import run

MODULE = "parts_for_diagnose"
PARTS = """
import torch

class Data(torch.utils.data.Dataset):
    def __init__(self, bad=(), fail=False, size=24):
        self.bad, self.fail, self.size = set(bad), fail, size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        if self.fail and index == 5:
            raise EOFError("short file")
        return torch.full((3,), 0.0 if index in self.bad else 1.0 + index)

def loss(model, batch):
    return model(batch).mean() + torch.log(batch.sum(1)).mean()

def wrong(model, batch):
    return model(batch).mean() + torch.ones(3) @ torch.ones(4)

def batches():
    yield from (torch.full((2, 3), float(i)) for i in range(4))
"""
CONFIG = """
seed: 0
model: {_target_: torch.nn.Linear, in_features: 3, out_features: 1}
loss: {_target_: './parts_for_diagnose.py:loss'}
data: {train: {_target_: './parts_for_diagnose.py:Data'}, batch_size: 4}
loop: {max_epochs: 1, device: cpu}
logging: {tensorboard: false, console: 'off'}
"""


def test_a_healthy_config_exits_with_0_and_writes_nothing(capsys):
    before = sorted(Path().rglob("*.yaml"))
    assert run(["diagnose", "c.yaml", "--steps", "2"]) == 0
    assert capsys.readouterr().out == "c: 2 steps examined, all healthy\n"
    assert run(["diagnose", "c.yaml", "--scan"]) == 0
    assert capsys.readouterr().out == "c: 6 batches examined, all healthy\n"
    assert sorted(Path().rglob("*.yaml")) == before
    assert not Path("runs").exists()


def test_bad_steps_are_explained_once(capsys):
    arguments = ["diagnose", "c.yaml", "data.train.bad=[1,6,7]", "data.shuffle=false"]
    assert run(arguments) == 3
    text = capsys.readouterr().out
    assert text.startswith(
        "c: 3 steps examined, 2 bad\n\nSTEP 0: loss is bad, log_of_nonpositive\n  FIRST BAD OP  log "
    )
    assert text.count("FIRST BAD OP") == 1
    assert "STEP 1: loss is bad, log_of_nonpositive\n  the same operation as above, samples 2, 3\n" in text
    assert "\x1b" not in text


def test_a_scan_lists_the_indices_in_the_data_set_whatever_the_order_of_training(capsys):
    assert run(["diagnose", "c.yaml", "data.train.bad=[1,22]", "--scan", "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert (result["examined"], result["unit"]) == (6, "batch")
    assert [(i["step"], i["samples"], i["indices"]) for i in result["incidents"]] == [(0, [1], [1]), (5, [2], [22])]
    assert result["incidents"][0]["remedies"]
    assert not result["incidents"][1]["remedies"]  # tried once per place
    assert run(["diagnose", "c.yaml", "data.train.bad=[1,22]", "--scan", "--limit", "1", "--no-remedies"]) == 3
    text = capsys.readouterr().out
    assert "in the data set at 1\n" in text
    assert "--limit N looks for more" in text
    assert "TRIED" not in text


def test_data_without_indices_can_be_scanned(capsys):
    assert run(["diagnose", "c.yaml", "data.train._target_=./parts_for_diagnose.py:batches", "--scan", "--json"]) == 3
    (incident,) = json.loads(capsys.readouterr().out)["incidents"]
    assert (incident["step"], incident["indices"]) == (0, [])


def test_exceptions_of_user_code_and_mistakes(capsys):
    assert run(["diagnose", "c.yaml", "data.train.fail=true", "--scan"]) == 1
    assert "EOFError: short file" in capsys.readouterr().err
    assert run(["diagnose", "c.yaml", "loss._target_=./parts_for_diagnose.py:wrong"]) == 1
    assert "inconsistent tensor size" in capsys.readouterr().err
    assert run(["diagnose", "c.yaml", "seed=x"]) == 2
    assert run(["diagnose", "nothing.yaml"]) == 2
    assert run(["diagnose", "c.yaml", "--step", "3"]) == 2
    Path("empty").mkdir()
    assert run(["diagnose", "empty"]) == 2
    assert "holds no run" in capsys.readouterr().err


def fit(*arguments):
    assert run(["fit", "c.yaml", "--out", "out", "data.shuffle=false", *arguments]) == 0


def test_the_incidents_of_a_run_newest_first(capsys):
    fit("data.train.bad=[1,9,22]")
    assert run(["diagnose", "out"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("out: 3 incidents, newest first\n\nINCIDENT at step 5, ")
    order = [text.index(f"INCIDENT at step {step}, ") for step in (5, 2, 0)]
    assert order == sorted(order)
    assert text.count("FIRST BAD OP") == 1
    assert "Verified" in text  # as it was when remedies were tried, at the first
    assert "safetrain replay out/incidents/step-000002" in text
    assert run(["diagnose", "out", "--step", "2"]) == 0
    text = capsys.readouterr().out
    assert "FIRST BAD OP" in text
    assert "step 5" not in text
    assert run(["diagnose", "out", "--step", "3"]) == 2
    assert "choose one of these: 5, 2, 0" in capsys.readouterr().err
    assert run(["diagnose", "out", "loop.max_steps=3"]) == 2


def test_json_has_the_incidents_as_they_are_on_disk_and_those_that_only_the_journal_has(capsys):
    fit("data.train.bad=[1,9]", "forensics.max_incidents=1")
    with open("out/journal.jsonl", "a") as journal:
        journal.write('{"event": "incident", "st')
    assert run(["diagnose", "out", "--json"]) == 0
    newest, oldest = json.loads(capsys.readouterr().out)["incidents"]
    assert (newest["step"], newest["path"]) == (2, None)
    assert oldest.pop("path") == "incidents/step-000000"
    assert oldest == json.loads(Path("out/incidents/step-000000/incident.json").read_text())
    assert run(["diagnose", "out"]) == 0


def test_a_run_without_incidents(capsys):
    fit()
    assert run(["diagnose", "out"]) == 0
    assert capsys.readouterr().out == "out: no incident\n"
