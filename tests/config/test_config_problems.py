"""Every mistake is found, all at once, with its place and with what to do."""

import math
from pathlib import Path

import pytest
from config_files import problems_of

from safetrain.config import load_config


def problems_in(text, overrides=()):
    Path("c.yaml").write_text(text)
    return problems_of("c.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loop:\n  max_stepz: 3\n", "c.yaml:2: loop.max_stepz: unknown key, did you mean 'max_steps'?"),
        ("recovery: {zzz: 1}\n", "c.yaml:1: recovery.zzz: unknown key; accepted: heal, ladder, budget_steps"),
        ("max_steps: 3\n", "c.yaml:1: max_steps: unknown key, did you mean 'loop.max_steps'?"),
        ("loop: {max_steps: ten}\n", "c.yaml:1: loop.max_steps: 'ten' is not accepted, give an integer ≥ 1 or null"),
        ("loop: {grad_accum: true}\n", "c.yaml:1: loop.grad_accum: true is not accepted, give an integer ≥ 1"),
        ("loop: {grad_accum: null}\n", "c.yaml:1: loop.grad_accum: null is not accepted, give an integer ≥ 1"),
        ("loop: {grad_accum: 1.5}\n", "c.yaml:1: loop.grad_accum: 1.5 is not accepted, give an integer ≥ 1"),
        ("loop: {grad_accum: [1]}\n", "c.yaml:1: loop.grad_accum: [1] is not accepted, give an integer ≥ 1"),
        ("loop: {ema: true}\n", "c.yaml:1: loop.ema: true is not accepted, give a number > 0 and < 1 or null"),
        ("data: {shuffle: 1}\n", "c.yaml:1: data.shuffle: 1 is not accepted, give true or false"),
        ("name: [a]\n", "c.yaml:1: name: ['a'] is not accepted, give a string"),
        ("name: yes\n", "c.yaml:1: name: true is not accepted, give a string"),
        ("loop: {max_steps: 0}\n", "c.yaml:1: loop.max_steps: 0 is out of range, give an integer ≥ 1 or null"),
        ("loop: {ema: 1.0}\n", "c.yaml:1: loop.ema: 1.0 is out of range, give a number > 0 and < 1 or null"),
        ("loop: {ema: .nan}\n", "c.yaml:1: loop.ema: nan is out of range, give a number > 0 and < 1 or null"),
        ("guards: {clip: {z: .inf}}\n", "c.yaml:1: guards.clip.z: inf is out of range, give a number > 0"),
        ("guards: {finite: {window: 1001}}\n", "give an integer ≥ 1 and ≤ 1000"),
        ("loop: {precision: fp8}\n", "c.yaml:1: loop.precision: 'fp8' is not accepted, give one of fp32, bf16, fp16"),
        ("loop: {precision: no}\n", "YAML reads 'no' as false, did you mean 'fp32'? Give one of fp32, bf16, fp16"),
        ("loop: {precision: off}\n", "YAML reads 'off' as false, did you mean 'fp32'?"),
        ("loop: 5\n", "c.yaml:1: loop: 5 is not a section; its keys are: max_steps, "),
        ("guards: 5\n", "c.yaml:1: guards: 5 is not a section of guards by name"),
        ("guards: {clip: 5}\n", "c.yaml:1: guards.clip: 5 is not a section; its keys are: mode, "),
        ("guards: {clip: {moed: norm}}\n", "c.yaml:1: guards.clip.moed: unknown key, did you mean 'mode'?"),
        ("guards: {clp: {}}\n", "c.yaml:1: guards.clp: unknown guard, did you mean 'clip'?"),
        ("guards: {clp: null}\n", "c.yaml:1: guards.clp: unknown guard, did you mean 'clip'?"),
        ("guards:\n  clip:\n", "c.yaml:2: guards.clip: nothing after the colon"),
        ("seed: 1\nguards:\n", "c.yaml:2: guards: nothing after the colon"),
        ("seed: 1\nseed: 2\n", "c.yaml:2: seed: duplicate key, first given at line 1"),
        ("- 1\n", "c.yaml:1: the file must hold sections such as 'model:' and 'loop:', not a list"),
        ("hello\n", "not a single value"),
        ("loop:\n\tmax_steps: 3\n", "c.yaml:2:1: indented with a tab, which YAML does not allow; use spaces"),
        ("loop: {max_steps: 3\nseed: 1\n", "c.yaml:2:"),
        ("seed: 'x\n", "c.yaml:"),
        (
            "model: {_target_: builtins.dict, x: &a [*a]}\n",
            "c.yaml:1: model.x.0: the alias refers to the node that contains it",
        ),
        ("seed: !!python/object:os.system {}\n", "seed"),
        ("optimizer: null\n", "c.yaml:1: optimizer: null is not accepted"),
        ("on: 1\n", "YAML reads this key as true"),
        ("[a]: 1\n", "a key must be a plain word"),
    ],
)
def test_problem(text, problem):
    (found,) = problems_in(text)
    assert problem in found


def test_text_that_is_not_utf8_or_no_yaml():
    Path("c.yaml").write_bytes(b"name: \xff\n")
    assert "save the file as UTF-8" in problems_of("c.yaml")[0]
    (problem,) = problems_in("seed: 1\nloop: }\n")
    assert problem.startswith("c.yaml:2:7: ")
    assert "'loop: }'" in problem


def test_all_problems_come_at_once_whatever_their_kind():
    text = """
nme: x
loop: {max_steps: ten, precision: fp8}
guards: {clp: null, clip: {max_norm: -1}}
seed: ${nothing}
model: {_target_: torch.nn.Linear, in_featurs: 3, out_features: 1}
data: {batch_size: 0, batch_size: 0}
"""
    problems = problems_in(text, ("loop.max_stepz=3", "~model.nothing", "wrong"))
    for part in (
        "c.yaml:2: nme", "loop.max_steps:", "loop.precision", "guards.clp", "guards.clip.max_norm", "seed: '${nothing}'",
        "in_featurs", "missing argument 'in_features'", "data.batch_size: duplicate", "data.batch_size: 0 is out",
        "override 'loop.max_stepz=3': loop.max_stepz: unknown key", "override '~model.nothing'", "override 'wrong'",
    ):  # fmt: skip
        assert any(part in problem for problem in problems), part
    assert len(problems) == 13


def test_problems_of_a_base_name_the_base():
    Path("base.yaml").write_text("seed: 1\nlop: {}\n")
    (problem,) = problems_in("extends: base.yaml\n")
    assert problem == "base.yaml:2: lop: unknown key, did you mean 'loop'?"


def test_what_yaml_gets_wrong_is_read_as_meant():
    Path("c.yaml").write_text(
        """
name: 007
loop: {ema: 1e-3, device: cuda:1, max_steps: 1e3}
optimizer: {lr: 1e-3, weight_decay: 1E-2, eps: 1.e-8, betas: [.9, 0.999]}
data: {train: {_target_: builtins.dict, a: 1:30, b: 2020-01-01, c: 0x10, d: 1_000, e: -1e5, f: "1e-3", g: 010}}
logging: {console: off}
"""
    )
    config = load_config("c.yaml")
    assert config.name == "007"
    assert (config.loop.ema, config.loop.device, config.loop.max_steps) == (1e-3, "cuda:1", 1000)
    assert config.optimizer == {
        "_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 1e-2, "eps": 1e-8, "betas": [0.9, 0.999],
    }  # fmt: skip
    expected = {"a": "1:30", "b": "2020-01-01", "c": 16, "d": 1000, "e": -1e5, "f": "1e-3", "g": 10}
    assert config.data.train == {"_target_": "builtins.dict", **expected}
    assert config.logging.console == "off"


def test_what_python_gives_is_read_as_the_field_stores_it():
    config = load_config({"loop": {"ema": "1e-3", "max_steps": "10"}, "data": {"shuffle": "false"}})
    assert (config.loop.ema, config.loop.max_steps, config.data.shuffle) == (1e-3, 10, False)
    assert isinstance(load_config({"guards": {"clip": {"z": 3}}}).guards["clip"].z, float)
    model = load_config({"model": {"_target_": "builtins.dict", "x": math.inf}}).model
    assert model == {"_target_": "builtins.dict", "x": math.inf}
    (problem,) = problems_of({"model": {"_target_": "builtins.dict", "layer": object()}})
    assert "model.layer: a object cannot be part of a config" in problem
