"""Every example in docs/examples runs with the documented result, and is listed in the README there."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import load, run
from small import assert_same

from safetrain import load_config
from safetrain.guards import REGISTRY

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run an example as a script, from another directory; returns its globals."""
    monkeypatch.chdir(tmp_path)
    registered = dict(REGISTRY)

    def run_file(path: str) -> dict[str, Any]:
        return runpy.run_path(str(EXAMPLES / path), run_name="__main__")

    yield run_file
    REGISTRY.clear()
    REGISTRY.update(registered)  # removes guards that the example registered


def test_every_example_is_listed_and_tested():
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tested = Path(__file__).read_text(encoding="utf-8")
    files = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".yaml")]
    assert len(files) == 8
    for file in files:
        assert file in tested or file == "1_plain_config/model.py"
        assert file in readme or file.rpartition("/")[0] in readme
    for shown in re.findall(r"(?:python|safetrain fit) (docs/\S+?)`", readme):
        assert (ROOT / shown).is_file()


def test_plain_config(tmp_path: Path):
    result = run(load(EXAMPLES / "1_plain_config/config.yaml"), tmp_path / "run")
    assert result.healthy
    assert result.best is not None
    assert result.best["loss"] < 0.6
    assert load_config(EXAMPLES / "1_plain_config/config.yaml", ["model.width=64"]).model["width"] == 64


def test_subclass(execute):
    result = execute("2_subclass/train.py")["result"]
    assert result.healthy
    assert result.best["explained"] > 0.9


def test_converted_loop_has_the_same_weights(execute):
    before, after = execute("3_converted_loop/before.py"), execute("3_converted_loop/after.py")
    assert after["result"].healthy
    assert_same(before["model"].state_dict(), after["model"].state_dict())
    assert_same(before["optimizer"].state_dict(), after["optimizer"].state_dict())


def test_the_diff_shown_is_the_difference():
    before, after = (
        (EXAMPLES / "3_converted_loop" / name).read_text(encoding="utf-8").splitlines()
        for name in ("before.py", "after.py")
    )
    diff = difflib.unified_diff(before, after, "before.py", "after.py", lineterm="", n=2)
    assert "\n".join(line.rstrip() for line in diff) in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_several_optimizers(execute, make_trainer):
    names = execute("4_several_optimizers/train.py")
    assert names["result"].healthy
    assert 0.8 < names["samples"].norm(dim=1).mean() < 1.2
    model, trainer = names["trainer"].model, names["trainer"]
    steps = {name: trainer.optimizer.state[next(part.parameters())]["step"] for name, part in model.named_children()}
    assert steps == {"generator": 300, "discriminator": 600}
    # They refuse together.
    batches = [torch.randn(16, 2) for _ in range(6)]
    batches[3].fill_(torch.nan)
    weights = []

    class Watched(names["GANTrainer"]):  # type: ignore[misc, name-defined]
        def on_commit(self, view):
            weights.append([p.detach().clone() for p in self.model.parameters()])

        def on_incident(self, incident):
            weights.append([p.detach().clone() for p in self.model.parameters()])

    result = make_trainer(names["GAN"](), Watched, train_data=batches, loss_fn=None).fit()
    assert [incident.step for incident in result.incidents] == [3]
    assert_same(weights[2], weights[3])
    assert not torch.equal(weights[3][0], weights[5][0])


def test_several_losses_name_the_one_that_went_wrong(execute):
    result = execute("5_several_losses/train.py")["result"]
    assert [(i.step, i.trigger.guard, i.trigger.signal) for i in result.incidents] == [
        (step, "parts", "regression") for step in (21, 61, 101)
    ]
    assert result.final_loss < 1


def test_metric_loss_trains_its_own_parameters(execute):
    names = execute("6_metric_loss/train.py")
    assert names["result"].healthy
    assert names["result"].best["recall_at_1"] > 0.95
    assert names["loss"].proxies in names["optimizer"].state
