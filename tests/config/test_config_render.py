"""Configs as text: round trips, origins, documentation and the schema."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.config import Config, load, load_config, recipe_names, to_yaml
from safetrain.config.describe import json_schema, schema_text
from safetrain.core.fields import fields_of
from safetrain.core.options import field_docs
from safetrain.guards import REGISTRY

names = st.text(st.characters(categories=["Ll", "Lu"], include_characters="_"), min_size=1, max_size=6)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.sampled_from(["${seed}", "\\${", "\\\\${x}\\", "", " x ", "a: b", "# c"]),
    st.sampled_from(["1e-3", "no", "null", "~", "1:30", "2020-01-01", "<<", "=", "0o7", "1_0"]),
).filter(lambda value: value != "???")
arguments = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.one_of(names, st.text(max_size=4), st.integers()), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
targets = st.dictionaries(names, arguments, max_size=4).map(lambda given: {"_target_": "builtins.dict", **given})
configs = st.builds(
    lambda name, seed, model, train, batch, steps, ema, compiled, mode, off: {
        "name": name,
        "seed": seed,
        "model": model,
        "data": {"train": train, "batch_size": batch},
        "loop": {"max_steps": steps, "ema": ema, "compile": compiled},
        "guards": {"clip": {"mode": mode}, **dict.fromkeys(off)},
    },
    st.text(max_size=12).filter(lambda text: text != "???"),
    st.none() | st.integers(0),
    st.none() | targets,
    st.none() | targets,
    st.integers(1),
    st.none() | st.integers(1),
    st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.booleans() | st.text(max_size=5).filter(lambda text: text != "???"),
    st.sampled_from(["norm", "adaptive", "value"]),
    st.lists(st.sampled_from(["finite", "backoff"]), unique=True),
)


def literally(value):
    """Strings as a dict source must spell them to mean themselves."""
    from safetrain.config.tree import escape

    if isinstance(value, dict):
        return {key: literally(child) for key, child in value.items()}
    if isinstance(value, list):
        return [literally(item) for item in value]
    return escape(value) if isinstance(value, str) else value


@settings(max_examples=50, deadline=None)
@given(configs)
def test_yaml_of_a_config_loads_back_to_an_equal_one(tmp_path_factory, data):
    loaded = load(literally(data))
    config = loaded.config
    assert config.model == data["model"]
    path = tmp_path_factory.mktemp("round_trip") / "config.yaml"
    for text in (to_yaml(config), to_yaml(config, loaded.origins, docs=True)):
        path.write_text(text, encoding="utf-8")
        assert load_config(path) == config
    assert load_config(config) == config


@pytest.mark.parametrize("name", recipe_names())
def test_a_saved_recipe_works_from_anywhere(name, tmp_path, monkeypatch):
    config = load_config(name)
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    monkeypatch.chdir(tmp_path)
    assert load_config("saved.yaml") == config


def test_the_yaml_is_complete_and_readable_by_any_reader():
    data = yaml.safe_load(to_yaml(load_config()))
    assert list(data) == list(fields_of(Config))
    assert data["guards"]["clip"]["z"] == 8.0
    assert data["optimizer"]["lr"] == 1e-3


def test_origins_stand_behind_values_and_docs_above_them(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("loop:\n  max_steps: 3\n")
    loaded = load(path, ["seed=1"])
    text = to_yaml(loaded.config, loaded.origins, docs=True)
    assert "seed: 1  # override\n" in text
    assert "  # Stop after this many committed optimizer steps.\n  max_steps: 3  # a.yaml:2\n" in text
    assert "  log_every: 10  # default\n" in text
    assert f"    # {field_docs(REGISTRY['clip'].Config)['z']}\n    z: 8.0  # default\n" in text


def test_the_schema_text_names_every_field_with_what_it_accepts():
    text = schema_text()
    assert "    max_steps: an integer ≥ 1 or null (default: null)\n        Stop after this many" in text
    assert "        mode: one of adaptive, norm, group_norm, value (default: adaptive)\n" in text
    for name, field in fields_of(Config).items():
        assert f"{name}:" in text
        for inner in fields_of(field.section) if field.section else ():
            assert f"    {inner}: " in text
    for name, guard in REGISTRY.items():
        assert f"    {name}: " in text
        assert all(f"        {option}: " in text for option in fields_of(guard.Config))


def test_the_json_schema_describes_every_field_with_its_limits():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert set(properties) == {*fields_of(Config), "extends"}
    loop = properties["loop"]["properties"]
    assert {"type": "integer", "minimum": 1} in loop["max_steps"]["anyOf"]
    assert {"type": "null"} in loop["max_steps"]["anyOf"]
    assert {"enum": ["fp32", "bf16", "fp16"]} in loop["precision"]["anyOf"]
    assert {"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": 1.0} in loop["ema"]["anyOf"]
    assert loop["log_every"]["default"] == 10
    assert loop["log_every"]["description"]
    assert set(properties["guards"]["properties"]) == set(REGISTRY)
