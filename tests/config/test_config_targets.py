"""Targets: found and checked without importing, then imported and called."""

import inspect
import pickle
import sys
from pathlib import Path

import pytest
from config_files import problems_of, write

from safetrain import ConfigError
from safetrain.config import import_target, instantiate, load_config
from safetrain.config.targets import check_arguments, instantiate_loss, static_signature


@pytest.fixture(autouse=True)
def _clean_imports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.AdamW",
        "torch.optim.SGD",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.optim.lr_scheduler.OneCycleLR",
        "torch.nn.CrossEntropyLoss",
        "torch.nn.Linear",
        "torch.nn.MSELoss",
        "torch.nn.functional.cross_entropy",
        "torch.utils.data.TensorDataset",
        "torch.utils.data.DataLoader",
    ],
)
def test_the_static_signature_agrees_with_the_real_one(target):
    found = static_signature(target)
    assert found is not None
    real = inspect.signature(import_target(target)).parameters
    assert list(found.parameters) == list(real)
    for name, parameter in found.parameters.items():
        assert parameter.kind == real[name].kind
        assert (parameter.default is inspect.Parameter.empty) == (real[name].default is inspect.Parameter.empty)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def make(a, *, b=1): ...", ["a", "b"]),
        ("class make:\n    def __init__(self, a): ...", ["a"]),
        ("class make:\n    def __new__(cls, a): ...", ["a"]),
        ("class make: ...", []),
        ("class Base:\n    def __init__(self, a): ...\nclass Mixin: ...\nclass make(Mixin, Base): ...", ["a"]),
        ("from typing import Generic, TypeVar\nT = TypeVar('T')\nclass make(Generic[T]):\n    def __init__(self, a): ...", ["a"]),
        ("from dataclasses import dataclass, field\n@dataclass\nclass make:\n    a: int\n    b: list = field(default_factory=list)", ["a", "b"]),
        ("from dataclasses import dataclass\n@dataclass\nclass Base:\n    a: int\n@dataclass(frozen=True)\nclass make(Base):\n    b: int = 1", ["a", "b"]),
        ("def other(a): ...\nmake = other", ["a"]),
        ("from sibling import other as make", ["z"]),
        ("from sibling import *", ["y"]),
        ("import torch.nn as nn\nclass make(nn.Linear): ...", ["in_features", "out_features", "bias", "device", "dtype"]),
        ("try:\n    import nothing\nexcept ImportError:\n    pass\ndef make(a): ...", ["a"]),
        ("from typing import overload\n@overload\ndef make(a: int): ...\n@overload\ndef make(a: str): ...\ndef make(a, b=1): ...", ["a", "b"]),
    ],
)  # fmt: skip
def test_signatures_in_files(source, names):
    write("sibling.py", "def other(z): ...\ndef make(y): ...\n")
    path = write("m.py", source)
    found = static_signature(f"{path}:make")
    assert found is not None
    assert list(found.parameters) == names


@pytest.mark.parametrize(
    "source",
    [
        "import functools\nmake = functools.partial(print)",
        "def decorate(f): return f\n@decorate\ndef make(a): ...",
        "import random\nif random.random() < 2:\n    def make(a): ...\nelse:\n    def make(b): ...",
        "def __getattr__(name): return dict",
        "globals()['make'] = dict",
        "from nothing_installed import *",
        "from nothing_installed import make",
        "class Meta(type): ...\nclass make(metaclass=Meta):\n    def __init__(self, a): ...",
        "class make(dict): ...",
        "match 1:\n    case _:\n        make = dict",
        "def make(:",
    ],
)
def test_what_the_source_leaves_open_is_checked_at_run_time(source):
    path = write("m.py", source)
    assert static_signature(f"{path}:make") is None
    load_config({"model": {"_target_": "./m.py:make", "anything": 1}})


def test_an_alternative_constructor_is_checked_too():
    path = write(
        "m.py", "class A:\n    @classmethod\n    def make(cls, a): ...\n    @staticmethod\n    def other(b): ...\n"
    )
    assert str(static_signature(f"{path}:A.make")) == "(a)"
    assert str(static_signature(f"{path}:A.other")) == "(b)"


def test_a_package_below_the_current_directory_is_read_with_its_relative_imports():
    write("proj/__init__.py", "from .nets import *\nfrom .nets.deep import Deep as Renamed\n")
    write("proj/nets/__init__.py", "from .deep import Deep\nfrom ..other import Other\n")
    write("proj/nets/deep.py", "from ..other import Other\nclass Deep(Other): ...\n")
    write("proj/other.py", "raise RuntimeError('imported')\nclass Other:\n    def __init__(self, a): ...\n")
    for name in ("proj.Deep", "proj.Renamed", "proj.nets.Other", "proj.nets.deep.Deep"):
        assert str(static_signature(name)) == "(a)"
    assert "proj" not in sys.modules


def test_an_edited_file_is_read_again():
    path = write("m.py", "def make(a): ...\n")
    assert str(static_signature(f"{path}:make")) == "(a)"
    import os

    write("m.py", "def make(b): ...\n")
    os.utime(path, ns=(1, 1))
    assert str(static_signature(f"{path}:make")) == "(b)"


def step(model, batch, /, scale, *, eps=1e-8): ...


@pytest.mark.parametrize(
    ("given", "num_injected", "problems"),
    [
        (["scale"], 2, []),
        (["scale", "eps"], 2, []),
        ([], 2, ["missing argument 'scale'"]),
        (["scal"], 2, ["unknown argument 'scal', did you mean 'scale'?", "missing argument 'scale'"]),
        (["scale", "zzz"], 2, ["unknown argument 'zzz'; accepted: scale, eps"]),
        (["scale", "model"], 2, ["argument 'model' is given by safetrain; remove it"]),
        ([], 4, ["must accept 4 positional argument(s) from safetrain, accepts 3"]),
    ],
)
def test_check_arguments(given, num_injected, problems):
    assert check_arguments(inspect.signature(step), given, num_injected) == problems


def test_open_signatures_accept_everything():
    assert check_arguments(inspect.signature(lambda *args, **kwargs: 0), ["a", "b"], 3) == []


def test_arguments_are_checked_on_load_with_what_safetrain_injects():
    write("m.py", "def loss(model, batch, alpha=1): ...\nclass Loss:\n    def __init__(self, alpha): ...\n")
    good = {
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 3},
        "loss": {"_target_": "./m.py:loss", "alpha": 2},
    }
    load_config(good)
    load_config({"loss": {"_target_": "./m.py:Loss", "alpha": 2}})
    bad = {
        "optimizer": {"_target_": "torch.optim.SGD", "params": 1},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "tmax": 3},
        "loss": {"_target_": "./m.py:loss", "alpa": 2},
    }
    assert [problem.partition(": ")[2] for problem in problems_of(bad)] == [
        f"loss: {Path.cwd()}/m.py:loss: unknown argument 'alpa', did you mean 'alpha'?",
        "optimizer: torch.optim.SGD: argument 'params' is given by safetrain; remove it",
        "scheduler: torch.optim.lr_scheduler.CosineAnnealingLR: unknown argument 'tmax', did you mean 'T_max'?",
        "scheduler: torch.optim.lr_scheduler.CosineAnnealingLR: missing argument 'T_max'",
    ]
    assert "missing argument 'alpha'" in problems_of({"loss": {"_target_": "./m.py:Loss"}})[0]


def test_nested_targets_are_checked_at_any_depth():
    inner = {"_target_": "torch.nn.Linear", "in_feature": 1}
    (first, second) = problems_of({"model": {"_target_": "builtins.dict", "a": [{"b": {"c": [inner]}}]}})
    assert "model.a.0.b.c.0: torch.nn.Linear: unknown argument 'in_feature', did you mean 'in_features'?" in first
    assert "missing arguments 'in_features', 'out_features'" in second


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"_target_": "torch.optim.Adamw"}, "did you mean 'AdamW'?"),
        ({"_target_": "torch.optim.nothing.X"}, "'nothing' is not defined in"),
        ({"_target_": "nothing_installed.X"}, "there is no module 'nothing_installed' to import; install it"),
        ({"_target_": "torch.optim"}, "is a module; name a class or a function in it"),
        ({"_target_": "./nope.py:X"}, "there is no file"),
        ({"_target_": "./m.py"}, "add what to take from it: ./m.py:Name"),
        ({"_target_": "./m.py:Nte"}, "did you mean 'Net'?"),
        ({"_target_": "AdamW"}, "write package.module.Name or ./file.py:Name"),
        ({"_target_": 3}, "3 is not a target"),
        ({"_target": "torch.optim.SGD"}, "_target_ is missing ('_target' is spelt _target_)"),
        ({"lr": 3}, "_target_ is missing"),
        ("torch.optim.SGD", "'torch.optim.SGD' is not a target; write a section with '_target_: pkg.mod.Name'"),
    ],
)
def test_what_surely_does_not_exist_is_a_problem(node, problem):
    write("m.py", "class Net: ...\n")
    (found,) = problems_of({"model": node})
    assert problem in found


def test_a_trainer_takes_no_arguments():
    write("m.py", "class Mine: ...\n")
    load_config({"trainer": {"_target_": "./m.py:Mine"}})
    (problem,) = problems_of({"trainer": {"_target_": "./m.py:Mine", "x": 1}})
    assert "trainer.x: takes no arguments besides _target_; remove it" in problem


def test_file_targets_are_relative_to_their_file_and_become_absolute():
    net = write("proj/src/net.py", "class Net: ...\n")
    config = write("proj/configs/a.yaml", "model: {_target_: ../src/net.py:Net}\n")
    override = write("over.py", "class Net: ...\n")
    assert load_config(config).model == {"_target_": f"{net}:Net"}
    assert load_config({"model": {"_target_": "proj/src/net.py:Net"}}).model == {"_target_": f"{net}:Net"}
    assert load_config(config, ["model._target_=./over.py:Net"]).model == {"_target_": f"{override}:Net"}
    assert load_config({"model": {"_target_": f"{net}:Net"}}).model == {"_target_": f"{net}:Net"}


def test_nothing_is_imported_on_load():
    write("m.py", "raise RuntimeError('imported')\nclass Net: ...\n")
    load_config({"model": {"_target_": "./m.py:Net"}})


def test_a_file_is_loaded_once_and_shares_its_siblings():
    write("net_a.py", "count = []\nclass Net: ...\n")
    path = write("user_b.py", "from net_a import Net, count\ncount.append(1)\nclass User(Net): ...\n")
    user = import_target(f"{path}:User")
    assert user is import_target(f"{path}:User")
    net = import_target(f"{path.parent / 'net_a.py'}:Net")
    assert issubclass(user, net)
    assert sys.modules["net_a"].count == [1]
    assert sys.modules[user.__module__].User is user
    assert isinstance(pickle.loads(pickle.dumps(user())), user)


def test_two_files_of_one_name_are_two_modules():
    first = import_target(f"{write('a/same_name.py', 'class Net: x = 1')}:Net")
    second = import_target(f"{write('b/same_name.py', 'class Net: x = 2')}:Net")
    assert (first.x, second.x) == (1, 2)
    assert second is import_target(f"{Path.cwd() / 'b/same_name.py'}:Net")
    assert isinstance(pickle.loads(pickle.dumps(second())), second)


def test_a_file_whose_name_is_no_identifier():
    assert import_target(f"{write('my-net.py', 'class Net: ...')}:Net").__name__ == "Net"


def test_packages_below_the_current_directory_are_importable():
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
    write("cwd_pkg/inner.py", "class Net: ...\n")
    assert import_target("cwd_pkg.inner.Net").__name__ == "Net"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.optim.Adamw", "did you mean 'AdamW'"),
        ("nothing_installed.X", "install it, or correct the name"),
        ("torch.nothing.X", "has no 'nothing'"),
        ("./nope.py:X", "there is no file"),
        ("AdamW", "write package.module.Name"),
    ],
)
def test_import_errors_say_what_to_do(target, message):
    with pytest.raises(ConfigError, match=message):
        import_target(target)


def test_an_exception_inside_the_module_passes_through():
    path = write("broken_a.py", "1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        import_target(f"{path}:X")
    assert any(entry.path == path for entry in caught.traceback)
    write("broken_b.py", "import nothing_installed\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_installed"):
        import_target("broken_b.X")
    with pytest.raises(ModuleNotFoundError, match="nothing_installed"):
        import_target("./broken_b.py:X")
    path = write("broken-c.py", "1 / 0\n")
    for _ in range(2):  # a half-made module is not left behind
        with pytest.raises(ZeroDivisionError):
            import_target(f"{path}:X")


def test_instantiate_builds_nested_targets_first():
    inner = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    built = instantiate({"_target_": "builtins.dict", "a": inner, "b": [inner, {"c": inner}], "plain": {"x": 1}})
    half = built["a"]
    assert float(half) == 0.5
    assert built == {"a": half, "b": [half, {"c": half}], "plain": {"x": 1}}


def test_instantiate_passes_positional_arguments_and_checks_the_rest():
    assert instantiate({"_target_": "fractions.Fraction", "denominator": 4}, 1) == 0.25
    with pytest.raises(ConfigError, match="unknown argument 'denominatr', did you mean 'denominator'"):
        instantiate({"_target_": "fractions.Fraction", "denominatr": 4}, 1)
    with pytest.raises(ConfigError, match="_target_ is missing"):
        instantiate({"a": 1})
    with pytest.raises(ConfigError, match="cannot be called"):
        instantiate({"_target_": "math.pi"})


def test_a_loss_is_an_instance_or_a_function_with_its_arguments():
    path = write(
        "losses_a.py",
        "def loss(model, batch, alpha=1): return model, batch, alpha\n"
        "class Loss:\n    def __init__(self, beta=1): self.beta = beta\n    def __call__(self, m, b): return m, b, self.beta\n",
    )
    assert instantiate_loss({"_target_": f"{path}:loss"})(1, 2) == (1, 2, 1)
    assert instantiate_loss({"_target_": f"{path}:loss", "alpha": 5})(1, 2) == (1, 2, 5)
    assert instantiate_loss({"_target_": f"{path}:Loss", "beta": 6})(1, 2) == (1, 2, 6)
    with pytest.raises(ConfigError, match="unknown argument 'alpa'"):
        instantiate_loss({"_target_": f"{path}:loss", "alpa": 5})
