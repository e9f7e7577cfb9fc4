"""Which targets of a config from somewhere else may be imported and called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from safetrain.config.sources import bundled_dir
from safetrain.incidents.trust import Trust

FILE = """
import os
import torch
from functools import partial
class Net(torch.nn.Linear):
    @classmethod
    def small(cls): ...
def loss(model, batch): ...
bound = partial(os.mkdir, "x")
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("net_for_trust", "space_for_trust", "space_for_trust.net", "space_for_trust.other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("net_for_trust.py").write_text(FILE)
    Path("space_for_trust").mkdir()
    Path("space_for_trust/net.py").write_text(FILE)
    Path("space_for_trust/other.py").write_text(FILE)


@pytest.mark.parametrize(
    "target",
    [
        "net_for_trust.py:Net",
        "net_for_trust.py:Net.small",
        "net_for_trust.py:loss",
        "net_for_trust.Net",
        "space_for_trust.net.Net",
        "torch.nn.Linear",
        "torch.nn.functional.mse_loss",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.utils.data.TensorDataset",
        "safetrain.safe.bce",
        "safetrain.optimizers.adamw",
        "safetrain.SafeTrainer",
        "RECIPES/char_gpt.py:CharGPT",
        "net_for_trust.py:torch.nn.Linear",
    ],
)
def test_targets_of_the_project_of_torch_and_of_the_recipes_are_trusted(target: str) -> None:
    assert Trust(Path("run")).allows(target.replace("RECIPES", str(bundled_dir() / "recipes")))


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.call",
        "builtins.exec",
        "posix.system",
        "torch.load",
        "torch.hub.load",
        "torch.nn.modules.module.warnings.sys.exit",
        "safetrain.cli.main.run",
        "safetrain.config.load_config",
        "safetrain.optim.build.fused_where_supported",
        "safetrain.config.targets.instantiate",
        "pytest.main",
        "numpy.load",
        "net_for_trust.py:os.system",
        "net_for_trust.py:torch.hub.load",
        "net_for_trust.py:bound",
        "no_such_module.Name",
        "not a target",
    ],
)
def test_nothing_else_is_trusted(target: str) -> None:
    assert not Trust(Path("run")).allows(target)
    assert Trust(Path("run"), everything=True).allows(target)


def test_several_modules_of_a_package_without_init() -> None:
    trust = Trust(Path("run"))
    assert trust.allows("space_for_trust.net.Net")
    assert trust.allows("space_for_trust.other.loss")


def test_a_run_directory_that_is_the_project_is_the_project(tmp_path: Path) -> None:
    assert Trust(tmp_path).allows("net_for_trust.py:Net")
    assert not Trust(tmp_path / "space_for_trust").allows("space_for_trust/net.py:Net")


def test_also_safetrain_below_the_current_directory_is_not_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert not Trust(Path("run")).allows("safetrain.cli.main.run")
    assert not Trust(Path("run")).allows("safetrain/config/targets.py:instantiate")
