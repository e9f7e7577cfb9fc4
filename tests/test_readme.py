"""The README tells the truth: its code runs, its config trains, its tree is the tree, its guard is a guard."""

import re
from pathlib import Path

import pytest
import torch
from small import make_batches, make_model, mse

from safetrain import SafeTrainer, load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def marked(name, language):
    return re.search(rf"<!-- {name} -->\n```{language}\n(.*?)```", README, flags=re.DOTALL).group(1)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("code", blocks("python"))
def test_code_runs(code, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(code)
    exec(compile(code, str(path), "exec"), {"__name__": "example"})


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)

class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.x = torch.randn(count, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)
"""


def test_config_trains(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (config,) = blocks("yaml")
    (tmp_path / "my.yaml").write_text(config)
    result = SafeTrainer(config=load_config("my.yaml", ["logging.console=off"])).fit()
    assert result.healthy
    assert result.steps == 4 * 256 / 32


@pytest.fixture
def guard_file(tmp_path):
    path = tmp_path / "guard.py"
    path.write_text(marked("guard", "python"))
    return path


def test_guard_is_short_and_refuses_what_it_says(guard_file, tmp_path):
    assert len(guard_file.read_text().splitlines()) < 100
    batches = make_batches(20)
    batches[12][1].mul_(1e4)
    config = {
        "guards": {"loss_ceiling": {"_target_": "./guard.py:LossCeiling", "ratio": 50.0}},
        "logging": {"console": "off", "tensorboard": False},
    }
    model = make_model()
    before = {}

    class Watching(SafeTrainer):
        def on_commit(self, view):
            if view.step == 11:
                before.update({name: p.detach().clone() for name, p in self.model.named_parameters()})

        def on_incident(self, incident):
            assert all(torch.equal(p, before[name]) for name, p in self.model.named_parameters())

    result = Watching(model, loss_fn=mse, train_data=batches, config=config, run_dir="run").fit()
    (incident,) = result.incidents
    assert (incident.step, incident.trigger.guard, incident.trigger.signal) == (12, "loss_ceiling", "loss")
    assert before


def test_the_tree_is_the_tree():
    tree = next(block for block in blocks("text") if block.startswith("safetrain/"))
    told = set()
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        told |= {f"safetrain/{name}".rstrip("/") if line.startswith("  ") else name.rstrip("/") for name in names}
    missing = [name for name in told if not (ROOT / name).exists()]
    assert missing == []
    there = {f"safetrain/{p.name}" for p in (ROOT / "safetrain").iterdir() if p.name[0] not in "_."} - {
        "safetrain/py.typed"
    }
    assert sorted(there - told) == []


def test_every_registered_guard_is_in_the_table():
    from safetrain.guards import REGISTRY

    ours = [name for name, cls in REGISTRY.items() if cls.__module__.startswith("safetrain.guards.")]
    assert [name for name in ours if f"| `{name}` |" not in README] == []


def test_links_resolve():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_the_quickstart_says_what_the_readme_says(tmp_path):
    shown = marked("quickstart", "text")
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["logging.console=off", "logging.tensorboard=false"])
    result = SafeTrainer(config=config, run_dir=tmp_path / "run").fit()
    first = result.incidents[0]
    assert f"INCIDENT at step {first.step}, loss = nan: step repaired and committed" in shown
    assert first.origin.code.strip() in shown
    assert f"> {first.origin.line}" in re.sub(r" +", " ", shown)
    assert f"{first.cause.label}: div got the inputs below" in shown
    assert f"done: {result.steps} steps committed, {result.skipped} skipped" in shown
    assert f"incidents: {len(result.incidents)} (at step {', '.join(str(i.step) for i in result.incidents)})" in shown
