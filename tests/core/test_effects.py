"""An option that would have no effect implies what it needs, or is an error; for the options of every guard."""

import dataclasses

import pytest

from safetrain import UsageError, load_config
from safetrain.config import to_yaml
from safetrain.core.effects import effects
from safetrain.core.fields import fields_of
from safetrain.errors import ConfigError
from safetrain.guards import REGISTRY

OURS = {name: cls for name, cls in REGISTRY.items() if cls.__module__.startswith("safetrain.guards.")}
CONDITIONAL = [
    (guard, option, other, accepted)
    for guard, cls in OURS.items()
    for option, field in fields_of(cls.Config).items()
    for other, accepted in field.metadata.get("only", {}).items()
]


@pytest.mark.parametrize(("guard", "option", "other", "accepted"), CONDITIONAL)
def test_an_option_given_alone_takes_effect(guard, option, other, accepted):
    value = fields_of(OURS[guard].Config)[option].default
    assert getattr(load_config({"guards": {guard: {option: value}}}).guards[guard], other) in accepted
    assert getattr(OURS[guard](**{option: value}).config, other) in accepted


@pytest.mark.parametrize(("guard", "option", "other", "accepted"), CONDITIONAL)
def test_an_option_that_another_one_disables_is_an_error(guard, option, other, accepted):
    field = fields_of(OURS[guard].Config)[option]
    for choice in set(fields_of(OURS[guard].Config)[other].choices) - set(accepted):
        given = {other: choice, option: field.default}
        with pytest.raises(ConfigError, match=rf"guards.{guard}.{option}: has no effect with {other}: '{choice}'; set"):
            load_config({"guards": {guard: given}})
        with pytest.raises(UsageError, match=f"{option} has no effect"):
            OURS[guard](**given)


@pytest.mark.parametrize(
    ("guards", "says"),
    [
        ({"clip": {"max_norm": 1.0, "max_value": 2.0}}, "max_value: is for mode: value, and max_norm for mode: norm"),
        ({"clip": {"max_norm": 1.0, "z": 3.0}}, "z: is for mode: adaptive, and max_norm for mode: norm"),
        ({"finite": {"window": 20}}, "max_in_window is 30 and window is 20, so max_in_window is never reached"),
        ({"stall": {"early_steps": None, "early_rise": 0.5}}, "early_rise: has no effect with early_steps: null"),
    ],
)
def test_options_that_contradict_each_other(guards, says):
    with pytest.raises(ConfigError) as error:
        load_config({"guards": guards})
    assert says in str(error.value)


def test_a_config_that_was_written_by_a_run_loads_as_it_is(tmp_path):
    config = load_config({"guards": {"clip": {"max_norm": 3.0}}})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path).guards == config.guards


@pytest.mark.parametrize("guard", OURS)
def test_the_defaults_of_a_guard_contradict_nothing(guard):
    fields = fields_of(OURS[guard].Config)
    given = dataclasses.asdict(OURS[guard].Config())
    assert effects(fields, given).problems == {}
    assert effects(fields, {}).problems == {}
