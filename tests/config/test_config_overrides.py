"""`key=value` and `~key`, by example and as properties."""

import dataclasses
import string
import typing

import pytest
import yaml
from config_files import problems_of
from hypothesis import given, settings
from hypothesis import strategies as st

from safetrain.config import Config, load_config
from safetrain.config.schema import LADDER
from safetrain.core.fields import fields_of
from safetrain.core.options import config_attribute
from safetrain.guards import REGISTRY


def problem_of(*overrides, source=None):
    (problem,) = problems_of(source, overrides)
    return problem


def test_values_are_yaml():
    config = load_config(
        None,
        [
            "data.train={_target_: builtins.dict, sizes: [1, 2], none: null, deep: {a: 1e-3}}",
            "data.train.deep.b=true",
            "data.train.new.key=x",
            "data.train.text='1'",
            "loop.max_steps=",
            "loop.device=cuda:1",
        ],
    )
    assert config.data.train == {
        "_target_": "builtins.dict", "sizes": [1, 2], "none": None, "deep": {"a": 1e-3, "b": True}, "new": {"key": "x"},
        "text": "1",
    }  # fmt: skip
    assert config.loop.max_steps is None
    assert config.loop.device == "cuda:1"


def test_items_of_lists_are_reached_by_index():
    source = {"model": {"_target_": "builtins.dict", "items": [{"_target_": "builtins.dict", "a": 1}, 2]}}
    config = load_config(source, ["model.items.0.a=5", "model.items[1]=6"])
    assert config.model == {"_target_": "builtins.dict", "items": [{"_target_": "builtins.dict", "a": 5}, 6]}
    assert load_config(source, ["~model.items.1"]).model["items"] == source["model"]["items"][:1]
    assert "is not an index of model.items, a list of 2" in problem_of("model.items.2=1", source=source)


def test_a_new_target_drops_the_old_arguments_and_keeps_the_new_in_any_order():
    changes = ["optimizer.momentum=0.9", "optimizer._target_=torch.optim.SGD"]
    expected = {"_target_": "torch.optim.SGD", "momentum": 0.9}
    assert load_config(None, changes).optimizer == load_config(None, changes[::-1]).optimizer == expected


def test_deleting():
    source = {
        "scheduler": {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 0.5},
        "optimizer": {"lr": 0.5, "eps": 1e-3},
        "loop": {"max_steps": 3, "log_every": 2},
        "guards": {"clip": {"mode": "norm", "max_norm": 3.0}},
    }
    default = load_config()
    assert load_config(source, ["~scheduler"]).scheduler is None
    assert load_config(source, ["~optimizer.eps"]).optimizer == {"_target_": "torch.optim.AdamW", "lr": 0.5}
    assert load_config(source, ["~optimizer"]).optimizer == default.optimizer
    assert load_config(source, ["~loop.max_steps"]).loop == dataclasses.replace(default.loop, log_every=2)
    assert load_config(source, ["~loop"]).loop == default.loop
    assert load_config(source, ["~guards.clip"]).guards["clip"] is None
    both = ["~guards.clip.mode", "~guards.clip.max_norm"]
    assert load_config(source, both).guards["clip"].mode == default.guards["clip"].mode
    assert load_config(source, ["~guards.clip.mode"]).guards["clip"].max_norm == 3.0
    assert load_config(source, ["~guards"]).guards == default.guards


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("~lop", "override '~lop': lop is not there, nothing to delete, did you mean 'loop'?"),
        ("~optimizer.zzzz", "optimizer.zzzz is not there, nothing to delete; accepted: _target_, lr"),
        ("~guards.clp", "did you mean 'clip'?"),
        ("~model.width", "model is None"),
        ("~seed=3", "a deletion takes no value"),
        ("seed", "override 'seed': expected key=value, or ~key to delete"),
        ("=3", "the key is missing"),
        ("~", "the key is missing"),
        ("seed=[1", "override 'seed=[1': the value is not valid YAML"),
        ("seed.x.y=1", "override 'seed.x.y=1': seed: a mapping with the keys x"),
        ("loop.grad_accum.x=1", "loop.grad_accum is the value 1 and has no key 'x'"),
        ("loop.max_stepz=3", "override 'loop.max_stepz=3': loop.max_stepz: unknown key, did you mean 'max_steps'?"),
        ("seed=x", "override 'seed=x': seed: 'x' is not accepted"),
        ("extends=quickstart", "only a config file can extend others"),
    ],
)
def test_problem(override, problem):
    assert problem in problem_of(override)


def test_a_string_instead_of_a_list_is_not_taken_letter_by_letter():
    assert "overrides must be a list of strings" in problems_of(None, "seed=1")[0]


def values_of(field):
    if typing.get_origin(field.type) is list:
        items = st.sampled_from(field.choices) if field.choices else st.text(string.ascii_lowercase, max_size=8)
        return st.lists(items, max_size=3)
    if field.choices:
        return st.sampled_from(field.choices)
    bounds = field.bounds
    low = bounds.get("ge", bounds.get("gt"))
    high = bounds.get("le", bounds.get("lt"))
    members = {getattr(member, "__name__", "") for member in getattr(field.type, "__args__", (field.type,))}
    kinds = []
    if "int" in members:
        kinds.append(st.integers(None if low is None else int(low), int(high) if high is not None else 10**9))
    if "float" in members:
        options = {"exclude_min": "gt" in bounds, "exclude_max": "lt" in bounds}
        options = {key: value for key, value in options.items() if value}
        kinds.append(st.floats(low, high, allow_nan=False, allow_infinity=False, **options))
    if "bool" in members:
        kinds.append(st.booleans())
    if "str" in members:
        kinds.append(st.text(max_size=8).filter(lambda text: text != "???" and "${" not in text))
    if "NoneType" in members:
        kinds.append(st.none())
    return st.one_of(kinds)


FIELDS = {
    **{
        name: field
        for name, field in fields_of(Config).items()
        if not (field.section or field.is_target or name == "guards")
    },
    **{
        f"{section}.{name}": field
        for section, outer in fields_of(Config).items()
        if outer.section
        for name, field in fields_of(outer.section).items()
        if not field.is_target
    },
    **{
        f"guards.{guard}.{name}": field
        for guard in ("finite", "clip", "backoff")
        for name, field in fields_of(REGISTRY[guard].Config).items()
        if not field.metadata.keys()
        & {"only", "needs", "within"}  # what they need or imply: tests/core/test_effects.py
        and (guard, name) not in {("clip", "mode"), ("finite", "window")}
    },
}


def value_at(config, key):
    value = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, config_attribute(part))
    return value


def as_override(key, value):
    written = yaml.safe_dump(value, default_flow_style=True, default_style='"' if isinstance(value, str) else None)
    return f"{key}={written.removesuffix('...' + chr(10))}"


VALUES = {key: values_of(field) for key, field in FIELDS.items()}
VALUES["recovery.ladder"] = st.lists(st.sampled_from(LADDER), max_size=3)  # a text that names no rung is a problem

changes = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), max_size=6).flatmap(
    lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in keys})
)


@settings(max_examples=40, deadline=None)
@given(changes, st.randoms(use_true_random=False))
def test_overrides_set_exactly_what_they_name_in_any_order(given_values, random):
    overrides = [as_override(key, value) for key, value in given_values.items()]
    config = load_config(None, overrides)
    default = load_config()
    for key in FIELDS:
        assert value_at(config, key) == given_values.get(key, value_at(default, key)), key
    random.shuffle(overrides)
    assert load_config(None, overrides) == config


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(FIELDS)).flatmap(lambda key: st.tuples(st.just(key), VALUES[key], VALUES[key])))
def test_the_last_override_of_a_key_wins_and_deleting_it_restores_the_default(case):
    key, first, second = case
    twice = load_config(None, [as_override(key, first), as_override(key, second)])
    assert twice == load_config(None, [as_override(key, second)])
    assert load_config(None, [as_override(key, first), f"~{key}"]) == load_config()
