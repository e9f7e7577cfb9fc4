"""Which rungs are tried, in which order; custom rungs in YAML or in code."""

import sys

import pytest
from small import make_batches, with_bad_samples

from safetrain import ConfigError
from safetrain.config import load_config, to_yaml
from safetrain.config.schema import LADDER, RecoveryConfig
from safetrain.core.verdict import Action
from safetrain.recovery import RUNGS, Ladder, Rung, Settlement

OWN = """
from safetrain.recovery import Rung, Settlement
from safetrain.verdict import Action


class FirstHalf(Rung):
    changes_the_computation = True

    def budget(self, config):
        return 2

    def fits(self, case):
        return case.is_non_finite and not case.is_late

    def climb(self, case, bench):
        half = [tuple(part[: len(part) // 2] for part in batch) for batch in case.window]
        if not bench.try_again(case, half):
            return "the first half is no better"
        return Settlement(Action.COMMIT, ["trained on the first half"])


class Skip(Rung):
    def fits(self, case):
        return False


not_a_rung = 3
"""


def bad_second_half(*indices):
    return with_bad_samples(make_batches(12), *((index, slice(4, None)) for index in indices))


def bad_sample():
    return with_bad_samples(make_batches(8), (4, 2))


@pytest.mark.parametrize(
    ("ladder", "action"), [(["samples", "skip"], "commit"), (["skip", "samples"], "skip"), (["samples"], "commit")]
)
def test_rungs_are_tried_in_the_order_of_the_config(make_trainer, tmp_path, ladder, action):
    path = tmp_path / "own.yaml"
    path.write_text(f"recovery: {{ladder: [{', '.join(ladder)}]}}\nlogging: {{console: 'off', tensorboard: false}}\n")
    config = load_config(path)
    assert config.recovery.ladder == ladder
    result = make_trainer(*config.recovery.ladder, train_data=bad_sample()).fit()
    assert [incident.decision.action for incident in result.incidents] == [action]


def test_a_custom_rung_by_file_relative_to_the_config(make_trainer, tmp_path, check_stopped):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "own_rungs.py").write_text(OWN)
    path = tmp_path / "elsewhere" / "own.yaml"
    path.write_text("recovery:\n  ladder: [./own_rungs.py:FirstHalf, samples]\n  heal: []\n")
    config = load_config(path)
    assert config.recovery.ladder == [f"{tmp_path}/elsewhere/own_rungs.py:FirstHalf", "samples"]
    (tmp_path / "again.yaml").write_text(to_yaml(config))  # as it is kept in a run directory
    assert load_config(tmp_path / "again.yaml").recovery.ladder == config.recovery.ladder
    recovery = {"ladder": config.recovery.ladder, "heal": []}
    trainer = make_trainer(train_data=bad_second_half(3, 6, 9), recovery=recovery)
    result = check_stopped(trainer, "first_half: its budget of 2 is spent")
    assert [incident.decision.action for incident in result.incidents] == ["commit", "commit", "stop"]
    assert "first_half: trained on the first half" in result.incidents[0].decision.reasons


def test_a_custom_rung_by_module(make_trainer, tmp_path, monkeypatch):
    (tmp_path / "rungs_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = make_trainer("rungs_of_mine.FirstHalf", "skip", train_data=bad_second_half(3))
    assert [i.decision.action for i in trainer.fit().incidents] == ["commit"]
    # One that is called like one of ours hides nothing.
    assert type(make_trainer("rungs_of_mine.Skip", train_data=bad_sample()).ladder.rungs[0]) is not RUNGS["skip"]
    assert type(make_trainer("skip", train_data=bad_sample()).ladder.rungs[0]) is RUNGS["skip"]
    del sys.modules["rungs_of_mine"]


class Give(Rung):
    """Skips whatever it is."""

    def fits(self, case):
        return True

    def climb(self, case, bench):
        return Settlement(Action.SKIP, ["given up"])


def test_a_ladder_can_be_made_in_code(make_trainer):
    trainer = make_trainer(train_data=bad_sample())
    trainer.ladder = Ladder(trainer.config.recovery, [Give()])
    result = trainer.fit()
    assert [incident.decision.action for incident in result.incidents] == ["skip"]
    assert "give: given up" in result.incidents[0].decision.reasons


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("skp", "unknown rung 'skp', did you mean 'skip'?"),
        ("wait", "unknown rung 'wait'; accepted: retry, samples"),
        ("./nowhere.py:Rung", "nowhere.py"),
        ("safetrain.recovery.Rong", "Rong"),
        ("./file.py", "names a file; add what to take from it"),
    ],
)
def test_an_unknown_rung_is_a_config_error(name, message):
    with pytest.raises(ConfigError) as raised:
        load_config({"recovery": {"ladder": ["retry", name], "max_retrys": 3}})
    assert message in str(raised.value)
    assert "max_retrys" in str(raised.value)  # with every other problem


def test_an_object_that_is_no_rung_is_a_config_error(tmp_path):
    (tmp_path / "no_rungs.py").write_text(OWN)
    with pytest.raises(ConfigError, match=r"is not a rung; make it a subclass of safetrain\.recovery\.Rung"):
        Ladder(RecoveryConfig(ladder=[f"{tmp_path}/no_rungs.py:not_a_rung"]))
    with pytest.raises(ConfigError, match="unknown rung 'skp', did you mean 'skip'"):
        Ladder(RecoveryConfig(ladder=["skp"]))


def test_the_default_ladder_has_every_built_in_rung():
    assert list(RUNGS) == list(LADDER)
