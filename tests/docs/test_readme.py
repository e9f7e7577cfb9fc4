"""The README tells the truth: its config trains, its guards are all there. (That its code runs: test_pages.)"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from small import make_batches

from safetrain import SafeTrainer, load_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_config_trains(tmp_path):
    shutil.copy(ROOT / "tests" / "docs" / "given" / "README.md" / "model.py", tmp_path)
    (config,) = blocks("yaml")
    (tmp_path / "my.yaml").write_text(config)
    result = SafeTrainer(config=load_config("my.yaml", ["logging.console=off"])).fit()
    assert result.healthy
    assert result.steps == 4 * 256 / 32


@pytest.fixture
def guard_file(tmp_path):
    page = (ROOT / "docs" / "guards" / "your-own.md").read_text(encoding="utf-8")
    path = tmp_path / "guard.py"
    path.write_text(re.search(r"<!-- file: ceiling.py -->\n```python\n(.*?)```", page, flags=re.DOTALL).group(1))
    return path


def test_guard_is_short_and_refuses_what_it_says(guard_file, make_trainer):
    assert len(guard_file.read_text().splitlines()) < 100
    batches = make_batches(20)
    batches[12][1].mul_(1e4)
    guards = {"loss_ceiling": {"_target_": "./guard.py:LossCeiling", "ratio": 50.0}}
    before = {}

    class Watching(SafeTrainer):
        def on_commit(self, view):
            if view.step == 11:
                before.update({name: p.detach().clone() for name, p in self.model.named_parameters()})

        def on_incident(self, incident):
            assert all(torch.equal(p, before[name]) for name, p in self.model.named_parameters())

    result = make_trainer(cls=Watching, train_data=batches, config={"guards": guards}).fit()
    (incident,) = result.incidents
    assert (incident.step, incident.trigger.guard, incident.trigger.signal) == (12, "loss_ceiling", "loss")
    assert before


def test_every_registered_guard_is_in_the_table():
    from safetrain.guards import REGISTRY

    ours = [name for name, cls in REGISTRY.items() if cls.__module__.startswith("safetrain.guards.")]
    assert [name for name in ours if f"| [`{name}`]" not in README] == []


def test_a_reader_sees_all_of_it_in_one_sitting():
    assert len(README.splitlines()) <= 150
    first_code = re.search(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert "SafeTrainer(" in first_code.group(1)
    assert README[: first_code.start()].count("\n") < 25
