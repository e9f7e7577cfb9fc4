"""Values of the environment are used and never written."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from safetrain import SafeTrainer, load_config
from safetrain.cli.main import run
from safetrain.config import to_yaml
from safetrain.config.private import private_keys, read_digests
from safetrain.errors import ConfigError

SECRET = "hf_q8w7e6r5t4"
PARTS = """
import torch
class Data(torch.utils.data.Dataset):
    def __init__(self, token, url="", more=()):
        assert token == "hf_q8w7e6r5t4" or token == "another_one", token
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.ones(2), torch.ones(1) * (float("nan") if index == 5 else 1.0)
"""
CONFIG = """
seed: 0
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
loss: {_target_: torch.nn.MSELoss}
data:
  batch_size: 1
  train:
    _target_: ./parts_for_private.py:Data
    token: ${oc.env:HF_TOKEN}
    url: https://me:${oc.env:HF_TOKEN}@host/${data.batch_size}
    more: ["${data.train.token}", 1]
loop: {max_epochs: 1, device: cpu}
logging: {console: 'off'}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    Path("parts_for_private.py").write_text(PARTS)
    Path("c.yaml").write_text(CONFIG)


def test_they_are_resolved_for_the_run_and_kept_as_written_in_yaml() -> None:
    config = load_config("c.yaml")
    assert config.data.train["more"] == [SECRET, 1]
    assert config.data.train["url"] == f"https://me:{SECRET}@host/1"
    text = to_yaml(config)
    assert SECRET not in text
    assert "token: ${oc.env:HF_TOKEN}" in text
    assert load_config(config) == config
    assert to_yaml(load_config(config)) == text
    Path("again.yaml").write_text(text)
    assert load_config("again.yaml", ["name=c"]) == config
    assert (
        set(read_digests(text)) == set(private_keys(config)) == {f"data.train.{n}" for n in ("token", "url", "more.0")}
    )


def test_no_file_of_a_run_holds_one(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert run(["fit", "c.yaml", "--out", "out"]) == 0
    assert run(["report", "out"]) == 0
    assert run(["config", "show", "c.yaml", "--json"]) == 0
    assert run(["config", "show", "c.yaml"]) == 0
    written = [path for path in Path("out").rglob("*") if path.is_file()]
    assert {"config.yaml", "journal.jsonl", "report.html", "replay.pt"} <= {path.name for path in written}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert "not resolved in what is written: data.train.token" in Path("out/journal.jsonl").read_text()
    assert SECRET not in capsys.readouterr().out + caplog.text


def test_a_replay_needs_no_variable_and_a_resume_notices_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["fit", "c.yaml", "--out", "out"]) == 0
    monkeypatch.delenv("HF_TOKEN")
    assert run(["replay", "out/incidents/step-000005"]) == 0
    monkeypatch.setenv("HF_TOKEN", "another_one")
    config = load_config("out/config.yaml", ["loop.max_epochs=2"])

    def resume(how: bool | str) -> None:
        SafeTrainer(config=config, run_dir="out").fit(resume=how)

    with pytest.raises(ConfigError, match=r"data\.train\.token: from the environment, with another value") as raised:
        resume(True)
    assert SECRET not in str(raised.value)
    assert "another_one" not in str(raised.value)
    resume("force")


def test_short_values_that_other_interpolations_happen_to_hold_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "2")
    node = {
        "_target_": "torch.nn.Linear",
        "in_features": "${oc.decode:${oc.env:WIDTH}}",
        "out_features": "${loop.grad_accum}",
    }
    config = load_config({"model": node, "loop": {"grad_accum": 2}})
    assert config.model == {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    assert private_keys(config) == ["model.in_features"]


@pytest.mark.parametrize(
    "url", ['"${oc.decode:${oc.env:PARTS}}"', '"${data.train.more}", more: "${oc.decode:${oc.env:PARTS}}"']
)
def test_parts_of_a_variable_are_not_written(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTS", f"{{first: {SECRET}, second: [{SECRET}, 2]}}")
    Path("d.yaml").write_text(f"data: {{train: {{_target_: './parts_for_private.py:Data', token: x, url: {url}}}}}")
    config = load_config("d.yaml")
    assert config.data.train is not None
    assert config.data.train["url"] == {"first": SECRET, "second": [SECRET, 2]}
    text = to_yaml(config)
    assert SECRET not in text
    Path("written.yaml").write_text(text)
    assert load_config("written.yaml").data.train == config.data.train


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ("seed: ${oc.env:HF_TOKEN}", "${oc.env:HF_TOKEN}"),
        ("loop: {precision: '${oc.env:${oc.env:WHICH}}'}", "${oc.env:${oc.env:WHICH}}"),
        ("model: {_target_: './${oc.env:HF_TOKEN}.py:Net'}", "${oc.env:HF_TOKEN}.py"),
        ("seed: ${oc.env:LONG}", "${oc.env:LONG}"),
        ("seed: ${oc.env:QUOTED}", "${oc.env:QUOTED}"),
        ("model: {_target_: torch.nn.Linear, a: '${oc.env:HF_TOKEN}', b: '${${model.a}}'}", "${oc.env:HF_TOKEN}"),
    ],
)
def test_an_error_shows_how_a_value_was_written(config: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH", "HF_TOKEN")
    monkeypatch.setenv("LONG", SECRET * 50)
    monkeypatch.setenv("QUOTED", f"{SECRET}'\"\\")
    Path("d.yaml").write_text(config)
    with pytest.raises(ConfigError) as caught:
        load_config("d.yaml")
    assert SECRET not in str(caught.value)
    assert shown in str(caught.value)
