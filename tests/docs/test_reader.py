"""What a reader of the pages, and of nothing else, can do: convert a loop, write a guard, explain an incident.

None of this code is in a page; every name and option in it is.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from safetrain import SafeTrainer, load_config
from safetrain.guards import REGISTRY


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registered = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(registered)


class Blobs(Dataset):
    def __init__(self, count, seed):
        self.y = torch.arange(count) % 3
        self.x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed)) + self.y[:, None].float()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"x": self.x[index], "label": self.y[index]}


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def plain_loop(train, valid):
    """A classifier in bf16, accumulating over two micro-batches, with warm-up, clipping, and the best accuracy."""
    model, optimizer, scheduler = parts()
    loader, best = DataLoader(train, batch_size=16), 0.0
    for _ in range(2):
        model.train()
        for index, batch in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(batch["x"]).float(), batch["label"], label_smoothing=0.1) / 2
            loss.backward()
            if index % 2 == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            right = sum((model(b["x"]).argmax(-1) == b["label"]).sum().item() for b in DataLoader(valid, batch_size=16))
        best = max(best, right / len(valid))
    return model, best


def classify(model, batch):
    logits = model(batch["x"]).float()
    accuracy = (logits.argmax(-1) == batch["label"]).float().mean()
    return {"loss": F.cross_entropy(logits, batch["label"], label_smoothing=0.1), "accuracy": accuracy}


def test_a_reader_converts_a_loop():
    train, valid = Blobs(608, 1), Blobs(160, 2)
    expected, best = plain_loop(train, valid)
    model, optimizer, scheduler = parts()
    config = {
        "data": {"batch_size": 16, "shuffle": False},
        "loop": {"max_epochs": 2, "grad_accum": 2, "precision": "bf16", "monitor": "accuracy", "monitor_mode": "max"},
        "guards": {"clip": {"mode": "norm", "max_norm": 1.0}},
        "logging": {"console": "off"},
    }
    given = {"optimizer": optimizer, "scheduler": scheduler, "train_data": train, "eval_data": valid}
    result = SafeTrainer(model, loss_fn=classify, config=config, **given).fit()
    assert result.healthy
    assert result.best["accuracy"] == pytest.approx(best)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))


GUARD = '''
from dataclasses import dataclass

from safetrain import Action, Guard, Verdict, option


@dataclass
class CollapseConfig:
    share: float = option(0.5, gt=0.0, lt=1.0)
    """Refuse a step whose accuracy is below this share of its mean."""
    warmup: int = option(5, ge=1)


class Collapse(Guard):
    Config = CollapseConfig

    def __init__(self, config=None, **options):
        super().__init__(config, **options)
        self.mean, self.seen = 0.0, 0

    def judge(self, view):
        accuracy = view.metrics.get("accuracy", 0.0)
        if self.seen < self.config.warmup or accuracy >= self.config.share * self.mean:
            return Verdict()
        reason = f"accuracy {accuracy:.2f} against {self.mean:.2f}"
        return Verdict(Action.SKIP, reason=reason, evidence={"signal": "accuracy", "value": accuracy})

    def learn(self, view, decision):
        self.seen += 1
        self.mean += (view.metrics["accuracy"] - self.mean) / self.seen

    def state_dict(self):
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state):
        self.mean, self.seen = state["mean"], state["seen"]
'''


def test_a_reader_writes_a_guard(tmp_path):
    (tmp_path / "collapse.py").write_text(GUARD)
    torch.manual_seed(0)
    labels = torch.arange(640) % 3
    inputs = torch.randn(640, 5) * 0.3 + labels[:, None]
    labels[480:496] = (labels[480:496] + 1) % 3  # batch 30 has wrong labels
    batches = [{"x": x, "label": y} for x, y in zip(inputs.split(16), labels.split(16), strict=True)]
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    config = {
        "optimizer": {"lr": 1e-2},
        "guards": {"collapse": {"_target_": "./collapse.py:Collapse", "share": 0.4}, "spike": None},
        "logging": {"console": "off"},
    }
    result = SafeTrainer(model, loss_fn=classify, train_data=batches, config=config).fit()
    (incident,) = result.incidents
    assert (incident.step, incident.trigger.guard, incident.trigger.signal) == (30, "collapse", "accuracy")


def test_a_reader_explains_an_incident(tmp_path):
    """The recipe whose last batch is a single image: the five questions from incident.json, then the fix of its header."""
    small = ["loop.max_steps=30", "logging.console=off", "logging.tensorboard=false"]
    with pytest.warns(UserWarning, match="degrees of freedom"):
        SafeTrainer(config=load_config("contrastive_broken", small), run_dir="runs/first").fit()
    (path,) = Path("runs/first/incidents").glob("step-*/incident.json")
    incident = json.loads(path.read_text())
    assert (incident["origin"]["name"], incident["origin"]["phase"]) == ("std", "forward")
    assert "raw.std(0)" in incident["origin"]["code"]
    assert incident["cause"]["label"] == "empty_reduction"
    assert incident["origin"]["inputs"][0]["shape"][0] == 1  # a batch of one
    assert incident["samples"] == []
    assert incident["replay"] == {"reproduced": True, "deterministic": True, "bitwise": True}
    assert incident["decision"]["action"] == "skip"
    fixed = load_config("contrastive_broken", [*small, "data.drop_last=true"])
    assert SafeTrainer(config=fixed, run_dir="runs/second").fit().healthy
