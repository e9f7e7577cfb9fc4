"""Sources, composition and the typed result."""

import dataclasses
from pathlib import Path

import pytest
from config_files import problems_of, write
from omegaconf import OmegaConf

from safetrain.config import Config, Override, bundled_dir, load, load_config, recipe_names, to_yaml
from safetrain.config.schema import LoopConfig
from safetrain.guards import DEFAULT, REGISTRY


def test_no_source_gives_the_defaults_with_every_default_guard():
    config = load_config()
    assert config == dataclasses.replace(Config(), guards={name: REGISTRY[name].Config() for name in DEFAULT})


@pytest.mark.parametrize(
    "source",
    [
        {"loop": {"max_steps": 7}},
        {"loop": LoopConfig(max_steps=7)},
        OmegaConf.create({"loop": {"max_steps": 7}}),
        OmegaConf.merge(OmegaConf.structured(Config), {"loop": {"max_steps": 7}}),
        Config(loop=LoopConfig(max_steps=7)),
    ],
    ids=["dict", "dict of dataclass", "omegaconf", "structured omegaconf", "dataclass"],
)
def test_every_kind_of_source_is_completed_with_defaults(source):
    expected = load_config()
    expected.loop.max_steps = 7
    assert load_config(source) == expected


def test_a_file_is_found_by_str_and_by_path_and_nothing_else_is_read():
    path = write("sub/mine.yaml", "loop: {max_steps: 7}\n")
    assert load_config("sub/mine.yaml") == load_config(path) == load_config(str(path))
    assert load_config(path).loop.max_steps == 7
    assert "cannot be read from a int" in problems_of(3)[0]
    assert "cannot be read from a list" in problems_of([1])[0]


def test_name_is_the_files_unless_given():
    write("mine.yaml", "seed: 1\n")
    write("given.yaml", "name: other\n")
    assert load_config("mine.yaml").name == "mine"
    assert load_config("given.yaml").name == "other"
    assert load_config("mine.yaml", ["name=third"]).name == "third"
    assert load_config({"seed": 1}).name == "run"


@pytest.mark.parametrize("text", ["# nothing\n", "loop:\ndata:\nrecovery: null\n"], ids=["file", "sections"])
def test_what_is_empty_means_its_defaults(text):
    write("run.yaml", text)
    assert load_config("run.yaml") == load_config()


def test_recipes_are_found_by_name_from_any_directory():
    assert (bundled_dir() / "configs").is_dir()
    assert "quickstart" in recipe_names()
    Path("quickstart").mkdir()  # hides nothing
    assert load_config("quickstart").name == "quickstart"


def test_an_installed_package_uses_its_own_copy(monkeypatch, tmp_path):
    from safetrain.config import sources

    package = tmp_path / "site" / "safetrain"
    write("site/safetrain/bundled/configs/only.yaml", "seed: 5\n")
    monkeypatch.setattr(sources, "__file__", str(package / "config" / "sources.py"))
    assert bundled_dir() == package / "bundled"
    assert recipe_names() == ["only"]
    assert load_config("only").seed == 5


def test_an_unknown_name_lists_close_ones_and_the_recipes():
    (problem,) = problems_of("quickstrat")
    assert "did you mean 'quickstart'" in problem
    for name in recipe_names():
        assert name in problem or name.endswith("_broken")  # the twins would double the list


def test_a_missing_file_names_its_close_neighbours():
    write("train.yaml", "")
    (problem,) = problems_of("trian.yaml")
    assert "'trian.yaml'" in problem
    assert "did you mean 'train.yaml'" in problem
    assert "directory" in problems_of(".")[0]


def test_extends_merges_deep_later_wins_and_the_file_wins_over_all():
    write("a.yaml", "loop: {max_steps: 1, log_every: 1, grad_accum: 1}\nseed: 1\n")
    write("sub/b.yaml", "extends: ../a.yaml\nloop: {log_every: 2, grad_accum: 2}\n")
    write("c.yaml", "extends: a.yaml\nloop: {eval_every: 9, log_every: 7}\n")  # of the same base
    write("main.yaml", "extends: [c.yaml, sub/b.yaml]\nloop: {grad_accum: 3}\n")
    config = load_config("main.yaml")
    loop = config.loop
    assert (loop.max_steps, loop.log_every, loop.grad_accum, loop.eval_every, config.seed) == (1, 2, 3, 9, 1)


def test_extends_takes_a_recipe_and_works_in_a_dict():
    write("main.yaml", "extends: quickstart\nloop: {max_steps: 3}\n")
    expected = load_config("quickstart", ["loop.max_steps=3"])
    assert load_config("main.yaml") == expected
    assert load_config({"extends": ["quickstart"], "loop": {"max_steps": 3}}) == expected


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("seed: 1\nextends: [nope.yaml]\n", "a.yaml:2: extends:", "'nope.yaml' is neither a file nor a recipe"),
        ("extends: 3\n", "a.yaml:1: extends:", "must be a file or recipe name"),
        ("extends: b.yaml\n", "b.yaml:2: extends:", "a.yaml → b.yaml → a.yaml"),
    ],
)
def test_extends_of_a_missing_file_or_in_a_circle_says_where(text, place, message):
    write("a.yaml", text)
    write("b.yaml", "seed: 1\nextends: [a.yaml]\n")
    (problem,) = problems_of("a.yaml")
    assert problem.startswith(place)
    assert message in problem


def test_an_empty_section_keeps_what_was_extended():
    write("a.yaml", "loop: {max_steps: 5}\n")
    write("b.yaml", "extends: a.yaml\nloop:\n")
    assert load_config("b.yaml").loop.max_steps == 5


def test_another_target_replaces_the_node_whole_and_the_same_target_merges():
    write("a.yaml", "optimizer: {_target_: torch.optim.AdamW, weight_decay: 0.5}\n")
    write("other.yaml", "extends: a.yaml\noptimizer: {_target_: torch.optim.SGD, momentum: 0.9}\n")
    write("same.yaml", "extends: a.yaml\noptimizer: {_target_: torch.optim.AdamW, lr: 0.1}\n")
    write("args.yaml", "extends: a.yaml\noptimizer: {lr: 0.1}\n")
    assert load_config("other.yaml").optimizer == {"_target_": "torch.optim.SGD", "momentum": 0.9}
    merged = {"_target_": "torch.optim.AdamW", "weight_decay": 0.5, "lr": 0.1}
    assert load_config("same.yaml").optimizer == load_config("args.yaml").optimizer == merged


def test_the_same_file_target_seen_from_two_directories_is_the_same_target():
    write("m.py", "class Net:\n    def __init__(self, a=1, b=1): ...\n")
    write("base.yaml", "model: {_target_: './m.py:Net', a: 2}\n")
    write("sub/main.yaml", "extends: ../base.yaml\nmodel: {_target_: '../m.py:Net', b: 3}\n")
    assert load_config("sub/main.yaml").model == {"_target_": f"{Path.cwd() / 'm.py'}:Net", "a": 2, "b": 3}


def test_yaml_merge_keys_and_anchors():
    write("a.yaml", "loop: &l {max_steps: 5, log_every: 2}\n")
    write(
        "b.yaml",
        """
model: {_target_: torch.nn.Sequential}
data:
  train: &d {_target_: builtins.range, a: 1, b: 2}
  eval: {<<: *d, b: 3}
""",
    )
    assert load_config("b.yaml").data.eval == {"_target_": "builtins.range", "a": 1, "b": 3}


def test_interpolation_reads_other_values_defaults_and_the_environment(monkeypatch):
    monkeypatch.setenv("STEPS", "12")
    write(
        "a.yaml",
        """
name: n-${loop.log_every}
loop: {max_steps: "${oc.env:STEPS}", eval_every: "${.max_steps}"}
data: {eval: "${data.train}", train: {_target_: builtins.range, stop: "${loop.grad_accum}", more: ["${seed}"]}}
""",
    )
    config = load_config("a.yaml", ["seed=3"])
    assert config.name == "n-10"
    assert config.loop.max_steps == config.loop.eval_every == 12
    assert config.data.train == config.data.eval == {"_target_": "builtins.range", "stop": 1, "more": [3]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${loop.nothing}", "loop.nothing"),
        ("${oc.env:NOT_SET_AT_ALL}", "NOT_SET_AT_ALL"),
        ("${name}", ""),
        ("${", "valid"),
    ],
)
def test_interpolation_that_fails_is_a_problem_with_its_place(text, why):
    write("a.yaml", f"seed: 1\nname: '{text}'\nnme: 1\n")
    problems = problems_of("a.yaml")
    assert len(problems) == 2
    assert problems[0].startswith("a.yaml:2: name: ")
    assert why in problems[0]


def test_a_value_that_must_be_given_is_a_problem_until_it_is():
    write("a.yaml", "seed: ???\nmodel: {_target_: torch.nn.Linear, in_features: '???', out_features: 1}\n")
    assert [p.split(": ")[1] for p in problems_of("a.yaml")] == ["seed", "model.in_features"]
    assert load_config("a.yaml", ["seed=1", "model.in_features=2"]).seed == 1


def test_escaped_interpolation_is_text_and_stays_text():
    config = load_config({"name": "\\${seed}"})
    assert config.name == "${seed}"
    assert load_config(config).name == "${seed}"
    assert load_config(OmegaConf.create(to_yaml(config))).name == "${seed}"


def test_guards_are_typed_and_completed():
    config = load_config({"guards": {"clip": {"mode": "norm", "max_norm": 2}}})
    defaults = {name: REGISTRY[name].Config() for name in DEFAULT}
    assert config.guards == {**defaults, "clip": REGISTRY["clip"].Config(mode="norm", max_norm=2.0)}
    assert isinstance(config.guards["clip"].max_norm, float)


def test_null_turns_one_guard_off_or_all_and_what_is_off_can_be_turned_on_again():
    assert load_config({"guards": {"clip": None}}).guards["clip"] is None
    assert load_config({"guards": None}).guards == dict.fromkeys(DEFAULT)
    write("base.yaml", "guards: {clip: {mode: norm}, mine: {_target_: builtins.dict}}\n")
    write("a.yaml", "extends: base.yaml\nguards: null\n")
    assert load_config("a.yaml").guards == dict.fromkeys(DEFAULT)
    write("again.yaml", "extends: a.yaml\nguards: {clip: {mode: norm}}\n")
    guards = load_config("again.yaml").guards
    assert guards["clip"] == REGISTRY["clip"].Config(mode="norm")
    assert guards["finite"] is None


def test_an_outside_guard_stays_a_target_and_can_be_turned_off():
    write("g.py", "class Mine:\n    def __init__(self, limit): ...\n")
    write("a.yaml", "guards: {mine: {_target_: './g.py:Mine', limit: 3}}\n")
    assert load_config("a.yaml").guards["mine"] == {"_target_": f"{Path.cwd() / 'g.py'}:Mine", "limit": 3}
    for off in ("guards.mine=null", "~guards.mine"):
        assert "mine" not in load_config("a.yaml", [off]).guards


def test_origins_name_where_each_value_came_from():
    write("shared/base.yaml", "seed: 1\nloop:\n  max_steps: 5\n  log_every: 5\n")
    write("main.yaml", "extends: shared/base.yaml\n\nloop:\n  log_every: 6\nguards: {clip: null}\n")
    loaded = load("main.yaml", ["data.batch_size=8", Override("seed", 3, origin="--seed")])
    expected = {
        "seed": "--seed",
        "loop.max_steps": "shared/base.yaml:3",
        "loop.log_every": "main.yaml:4",
        "loop.device": "default",
        "data.batch_size": "override",
        "guards.clip": "main.yaml:5",
        "guards.finite.window": "default",
        "optimizer.lr": "default",
        "name": "main.yaml",
    }
    assert {key: loaded.origins[key] for key in expected} == expected
    assert loaded.source == Path.cwd() / "main.yaml"
    assert load({"seed": 3}).origins["seed"] == "dict"
    assert load({"seed": 3}).source is None


GUARD = """
from dataclasses import dataclass, field
from safetrain import Guard, Verdict
from safetrain.options import option

@dataclass
class CeilingConfig:
    limit: float = option(3.0, gt=0.0)
    names: list[str] = field(default_factory=list)

class Ceiling(Guard):
    Config = CeilingConfig

    def judge(self, view):
        return Verdict()

class Nested(Guard):
    @dataclass
    class Config:
        limit: float

class Lower(Ceiling):
    pass
"""


@pytest.mark.parametrize("name", ["Ceiling", "Nested", "Lower"])
def test_options_of_an_outside_guard_are_known_by_its_config(name):
    write("g.py", GUARD)
    good = {"guards": {"mine": {"_target_": f"./g.py:{name}", "limit": 2.0}}}
    assert load_config(good).guards["mine"]["limit"] == 2.0
    (problem,) = problems_of({"guards": {"mine": {"_target_": f"./g.py:{name}", "limit": 2.0, "limt": 2.0}}})
    assert "unknown argument 'limt', did you mean 'limit'" in problem
