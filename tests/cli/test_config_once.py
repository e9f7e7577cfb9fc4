"""`safetrain fit` reads and checks its config once, and writes it as YAML once."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from safetrain import ConfigError, load_config
from safetrain.cli.main import run
from safetrain.config import load, render, validate

COUNTED = {function.__code__: function.__name__ for function in (load, validate.validate, render.to_yaml)}


@pytest.fixture
def counts():
    found = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code in COUNTED:
            found[COUNTED[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    yield found
    sys.setprofile(before)


def test_fit_loads_and_renders_its_config_once(counts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["fit", "quickstart", "--fast-dev-run", "-q", "--out", "run"]) == 0
    assert counts == {"load": 1, "validate": 1, "to_yaml": 1}
    assert list(Path("run").glob("events.out.tfevents.*"))  # the config is in there too


def test_a_loaded_config_is_copied(counts):
    config = load_config({"guards": {"clip": {"mode": "norm"}}, "seed": 1})
    again = load_config(config)
    assert counts["load"] == 1
    assert again == config
    again.guards["clip"].max_norm = 2.0
    again.optimizer["lr"] = 0.5
    assert (config.guards["clip"].max_norm, config.optimizer["lr"]) == (1.0, 1e-3)


def test_one_that_was_changed_since_is_checked_again():
    config = load_config({"loop": {"max_steps": 1}})
    config.loop.max_steps = 0
    with pytest.raises(ConfigError, match="out of range"):
        load_config(config)
    config = load(None).config
    config.guards = {}
    assert load_config(config).guards.keys() == load_config().guards.keys()
    config = load_config({"loop": {"max_steps": 1}})
    config.loop.max_steps = True
    with pytest.raises(ConfigError, match="true is not accepted"):
        load_config(config)


def test_overrides_are_applied_to_a_loaded_one():
    config = load_config({"loop": {"max_steps": 1}})
    assert load_config(config, ["loop.max_steps=2"]).loop.max_steps == 2
    assert config.loop.max_steps == 1
