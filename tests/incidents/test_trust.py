"""Which targets of a config from somewhere else may be imported and called."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from safetrain.config import import_target
from safetrain.config.sources import bundled_dir
from safetrain.core.ownership import is_own, mark
from safetrain.errors import UsageError
from safetrain.incidents.harmless import NAMES, is_harmless
from safetrain.incidents.trust import Trust, targets_in

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
        "torch.utils.data.TensorDataset",
        "torch.utils.data.DataLoader",
        "torch.utils.data.datapipes.iter.FileOpener",
        "torch.utils.data.datapipes.iter.routeddecoder.RoutedDecoderIterDataPipe",
        "torch.jit.load",
        "torch.nn.Module",
        "torch.nn.DataParallel",
        "torch.nn.modules.module.Module",
        "torch.nn.parameter.torch.load",
        "torch.optim.Optimizer",
        "torch.optim.lr_scheduler.LambdaLR",
        "torch.distributions.Normal",
        "net_for_trust.py:torch.utils.data.Dataset",
        "safetrain.safe.find_bad_batches",
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


def own(run: Path) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("name: x")
    mark(run)
    return run


def test_a_run_directory_that_is_the_project_is_the_project(tmp_path: Path) -> None:
    assert Trust(own(tmp_path)).allows("net_for_trust.py:Net")
    assert not Trust(own(tmp_path / "space_for_trust")).allows("space_for_trust/net.py:Net")


@pytest.mark.parametrize("run", ["out", "runs/first", "experiments/one/runs/first"])
def test_a_run_made_here_may_name_all_of_the_project_but_what_is_inside_it(run: str) -> None:
    inside, neighbour = own(Path(run)) / "inside.py", Path(run).parent / "neighbour.py"
    inside.write_text(FILE)
    neighbour.write_text(FILE)
    assert Trust(Path(run)).allows("net_for_trust.py:Net")
    assert Trust(Path(run)).allows(f"{neighbour}:Net")
    assert not Trust(Path(run)).allows(f"{inside}:Net")


def test_a_run_from_elsewhere_brings_what_it_was_unpacked_with() -> None:
    for place in ("unpacked/runs/first", "unpacked/runs", "unpacked"):
        Path(place).mkdir(parents=True, exist_ok=True)
        Path(place, "beside_for_trust.py").write_text(FILE)
    own(Path("runs/mine"))
    trust = Trust(Path("unpacked/runs/first"))
    assert trust.allows("net_for_trust.py:Net")
    for brought in (
        "unpacked/beside_for_trust.py:Net",
        "unpacked/runs/beside_for_trust.py:Net",
        "unpacked/runs/first/beside_for_trust.py:Net",
        "unpacked.runs.first.beside_for_trust.Net",
        "unpacked.beside_for_trust.Net",
    ):
        assert not trust.allows(brought), brought
    assert not any(name.startswith("unpacked") for name in sys.modules)


def test_a_run_from_elsewhere_that_lies_directly_in_the_project_is_not_told_from_it(tmp_path: Path) -> None:
    Path("out").mkdir()
    with pytest.raises(UsageError, match=r"made elsewhere.*\n  - net_for_trust.py:Net, which came with the run"):
        Trust(Path("out")).check({"model": {"_target_": "net_for_trust.py:Net"}})
    assert Trust(Path("out"), given=["net_for_trust.py:Net"]).allows("net_for_trust.py:Net")
    Trust(own(Path("out"))).check({"model": {"_target_": "net_for_trust.py:Net"}})


def test_a_directory_in_which_this_user_never_trained_may_have_come_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("unpacked/runs/first").mkdir(parents=True)
    Path("unpacked/net.py").write_text(FILE)
    monkeypatch.chdir("unpacked")
    with pytest.raises(UsageError, match=r"have not trained in this directory.*\n  - net.py:Net"):
        Trust(Path("runs/first")).check({"model": {"_target_": "net.py:Net"}})
    assert not Trust(Path("runs/first")).allows_in_batch("net.py:Net")
    own(Path("runs/mine"))
    assert Trust(Path("runs/first")).allows("net.py:Net")


def test_a_link_in_an_archive_does_not_hide_what_came_with_it(tmp_path: Path) -> None:
    own(Path("runs/mine"))
    (tmp_path.parent / f"{tmp_path.name}-elsewhere").mkdir()
    Path("unpacked").mkdir()
    Path("unpacked/net.py").write_text(FILE)
    Path("unpacked/run").symlink_to(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    assert not Trust(Path("unpacked/run")).allows("unpacked/net.py:Net")


def test_a_rung_of_the_ladder_is_a_target() -> None:
    config = {"recovery": {"ladder": ["samples", "net_for_trust.py:Net"]}, "x": [{"_target_": "a.B"}]}
    assert list(targets_in(config)) == ["net_for_trust.py:Net", "a.B"]


def test_a_mark_does_not_survive_a_changed_config_or_another_directory(tmp_path: Path) -> None:
    run = own(tmp_path / "out")
    assert is_own(run)
    shutil.copytree(run, tmp_path / "copy")
    assert not is_own(tmp_path / "copy")
    (run / "config.yaml").write_text("name: y")
    assert not is_own(run)


def test_a_batch_may_hold_only_classes_of_the_project() -> None:
    trust = Trust(Path("run"))
    assert trust.allows_in_batch("net_for_trust.py:Net")
    for foreign in ("torch.nn.Linear", "torch.utils.data.TensorDataset", "safetrain.SafeTrainer", "os.system"):
        assert not trust.allows_in_batch(foreign)
    assert not trust.allows_in_batch("net_for_trust.py:torch.nn.Linear")


def test_every_name_on_the_list_of_harmless_parts_is_there() -> None:
    assert {name for name in NAMES if not is_harmless(import_target(name))} == set()


def test_also_safetrain_below_the_current_directory_is_not_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert not Trust(Path("run")).allows("safetrain.cli.main.run")
    assert not Trust(Path("run")).allows("safetrain/config/targets.py:instantiate")
