"""The guard that makes islands: what its globs match, that it takes them off again, and that grown ones last."""

import pytest
import yaml
from island_cases import Net

from safetrain import UsageError
from safetrain.guards.islands import Islands
from safetrain.precision.islands import islands_of
from safetrain.tensors.module_globs import matching


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*.norm", ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "norm"]),
        ("blocks.2.*", ["blocks.2.norm", "blocks.2.fc"]),
        ("blocks.1", ["blocks.1"]),
        ("LayerNorm", ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "norm"]),
        ("Lin*", ["blocks.0.fc", "blocks.1.fc", "blocks.2.fc", "head"]),
        ("Net", [""]),
        ("????", ["norm", "head"]),
    ],
)
def test_globs_match_names_and_types(glob, names):
    assert list(matching(Net(), [glob], "modules")) == names


@pytest.mark.parametrize(
    ("glob", "meant"), [("*.nrom", "*.norm"), ("block.2.norm", "blocks.2.norm"), ("layernorm", "LayerNorm")]
)
def test_a_glob_that_matches_nothing_is_an_error_with_what_was_meant(glob, meant):
    with pytest.raises(UsageError) as error:
        Islands(modules=[glob]).attach(Net())
    assert f"guards.islands.modules: {glob!r} matches no module of Net, did you mean {meant!r}?" in str(error.value)
    assert "To fix:" in str(error.value)


def test_attach_installs_what_the_config_names_and_what_it_returns_removes_it():
    model = Net()
    remove = Islands(modules=["*.norm", "loss"]).attach(model)
    assert islands_of(model) == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "norm", "loss"]
    remove()
    assert islands_of(model) == []


def test_a_failing_attach_leaves_nothing_behind():
    model = Net()
    guard = Islands(modules=["head"])
    guard.load_state_dict({"grown": ["blocks.9"]})
    with pytest.raises(UsageError, match=r"Net has no module 'blocks.9', did you mean 'blocks"):
        guard.attach(model)
    assert islands_of(model) == []


def test_islands_grow_and_are_restored_before_or_after_attach():
    model = Net()
    guard = Islands(modules=["head"])
    remove = guard.attach(model)
    guard.grow(model, "blocks.1.fc")
    guard.grow(model, "blocks.1.fc")
    guard.grow(model, "loss")
    assert islands_of(model) == ["blocks.1.fc", "head", "loss"]
    state = guard.state_dict()
    remove()
    assert islands_of(model) == []
    for attach_first in (True, False):
        twin, other = Islands(modules=["head"]), Net()
        if attach_first:
            removes = twin.attach(other)
            twin.load_state_dict(state)
        else:
            twin.load_state_dict(state)
            removes = twin.attach(other)
        assert islands_of(other) == ["blocks.1.fc", "head", "loss"]
        assert twin.state_dict() == state
        removes()
        assert islands_of(other) == []


def test_going_back_to_an_older_state_keeps_the_islands_grown_since():
    model = Net()
    guard = Islands()
    guard.attach(model)
    before = guard.state_dict()
    guard.grow(model, "head")
    guard.load_state_dict(before)
    assert islands_of(model) == ["head"]


def test_yaml_makes_the_grown_islands_permanent():
    model = Net()
    guard = Islands(modules=["*.norm"])
    guard.attach(model)
    assert guard.yaml() == ""
    guard.grow(model, "blocks.1.fc")
    guard.grow(model, "loss")
    options = yaml.safe_load(guard.yaml())["guards"]["islands"]
    assert options == {"modules": ["*.norm", "blocks.1.fc"], "loss": True}
    twin = Net()
    Islands(**options).attach(twin)
    assert islands_of(twin) == islands_of(model)
