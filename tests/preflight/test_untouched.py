"""A check changes nothing: a run after it is bit-identical to a run without it."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preflight_cases import NUM_CLASSES, NUM_FEATURES, cross_entropy, make_data, make_trainer
from small import assert_same, deep_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from safetrain import SafeTrainer, UsageError, check
from safetrain.checkpoint.state import TrainState
from safetrain.guards.backoff import Level
from safetrain.optim.optimizers import OptimizerGroup
from safetrain.preflight import FAIL, PASS, SKIP
from safetrain.tensors.rng import RandomState


class Busy(nn.Module):
    """Changes all that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, NUM_CLASSES)
        self.codebook = nn.Parameter(torch.zeros(16), requires_grad=False)
        self.register_buffer("lazy", None)
        self.calls = 0
        self.past: list[float] = []
        self.generator = torch.Generator().manual_seed(4)
        self.numpy = np.random.default_rng(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.past.append(float(x.mean()))
        if self.lazy is None:
            self.lazy = torch.zeros(3)
        self.lazy += 1
        h = self.dropout(F.relu(self.norm(self.hidden(x))))
        self.codebook.data = 0.9 * self.codebook.data + 0.1 * h.detach().mean(0)
        noise = torch.randn(h.shape, generator=self.generator) * float(self.numpy.random()) * random.random()
        return self.head(h + 0.01 * noise + 0.01 * self.codebook + 0.001 * min(self.calls, 5))


class Augmented(Dataset[Any]):
    """Draws from generators of its own, counts, and keeps what it has read."""

    def __init__(self) -> None:
        self.x, self.y = make_data()
        self.generator = np.random.default_rng(9)
        self.cache: dict[int, Tensor] = {}
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        first = self.cache.setdefault(index, self.x[index] + 0.001 * self.num_reads)
        noise = self.generator.normal(size=NUM_FEATURES) + np.random.normal() + random.random()
        return first + 0.01 * torch.from_numpy(noise).float(), self.y[index]


class Position:
    """Knows how far it was read."""

    def __init__(self) -> None:
        self.batches = batches()
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def shuffled_batches() -> Iterator[Any]:
    x, y = make_data()
    for rows in torch.randperm(len(x)).split(16):
        yield x[rows], y[rows]


def writing_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    x.mul_(0.5)
    return F.cross_entropy(model(x), y)


NUM_CALLS = 0


def counting_loss(model: nn.Module, batch: Any) -> Tensor:
    global NUM_CALLS
    NUM_CALLS += 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.01 * min(NUM_CALLS, 9))


def closure_loss() -> Callable[..., Tensor]:
    count = 0
    criterion = nn.CrossEntropyLoss(weight=torch.ones(NUM_CLASSES))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        return criterion(model(batch[0]), batch[1]) * (1 + 0.01 * min(count, 9))

    return loss


class Annealing(SafeTrainer):
    """Asks how far the run is."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * (1 + 0.1 * min(self.step, 5))


class Meddling(SafeTrainer):
    """A training step that changes whatever it can reach of the trainer."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        model.hidden.eval()
        self.stepper.history.epoch += 1
        self.stepper.history.refused_steps.append(self.step)
        self.run.result.skipped += 1
        self.guard("batch")
        self.guard("backoff").level = Level(0.25)
        self.guard("spike").load_state_dict(copy.deepcopy(type(self.guards.named("spike"))().state_dict()))
        self.optimizer.param_groups[0]["lr"] *= 0.5
        for state in self.optimizer.state.values():
            state["exp_avg"].add_(1)
        self.scheduler.step()
        self.precision.load_state_dict(self.precision.state_dict() | {"scale": 2.0})
        self.stream.num_consumed += 1
        if self.ema is not None:
            self.ema.update()
        return cross_entropy(model, batch)


class TwoOptimizers(SafeTrainer):
    def build_optimizer(self, model: nn.Module) -> OptimizerGroup:
        return OptimizerGroup(
            body=torch.optim.Adam(model.hidden.parameters(), lr=1e-3),
            head=torch.optim.SGD(model.head.parameters(), lr=0.1),
        )


class Teaching(SafeTrainer):
    """A subclass with state of its own."""

    num_steps = 0
    seen: list[float]

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.num_steps += 1
        self.seen = [*getattr(self, "seen", []), float(batch[0].sum())]
        return cross_entropy(model, batch) * (1 + 0.01 * min(self.num_steps, 9))


ONE_CYCLE = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 3e-3, "total_steps": 24}
COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 24}
MOMENTUM = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9}


def batches() -> list[Any]:
    x, y = make_data()
    return list(zip(x.split(16), y.split(16), strict=True))


def loader(generator: torch.Generator | None = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data()), 16, shuffle=True, generator=generator)


FUSED = {"_target_": "torch.optim.AdamW", "lr": 3e-3, "fused": True}
ISLANDS = {"islands": {"modules": ["head"], "loss": True}}
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "busy model": lambda: {"model": Busy()},
    "data that draws": lambda: {"data": Augmented()},
    "loader": lambda: {"data": loader()},
    "loader with a generator": lambda: {"data": loader(torch.Generator().manual_seed(2))},
    "list that is written to": lambda: {"data": batches(), "loss_fn": writing_loss},
    "generator function": lambda: {"data": shuffled_batches},
    "stateful data": lambda: {"data": Position()},
    "counting loss": lambda: {"loss_fn": counting_loss},
    "loss with a closure": lambda: {"loss_fn": closure_loss()},
    "asking for the step": lambda: {"cls": Annealing},
    "two optimizers": lambda: {"cls": TwoOptimizers},
    "compiled": lambda: {"loop": {"compile": "eager"}, "guards": {"stall": None}},
    "deferred reads": lambda: {"loop": {"host_read_every": 4}, "optimizer": FUSED},
    "subclass": lambda: {"cls": Teaching},
    "schedule and average": lambda: {"model": Busy(), "scheduler": ONE_CYCLE, "loop": {"ema": 0.9}},
    "momentum": lambda: {"optimizer": MOMENTUM, "guards": {"clip": {"mode": "norm", "max_norm": 0.5}}},
    "accumulation": lambda: {"loop": {"grad_accum": 3}},
    "fp16 with islands": lambda: {"loop": {"precision": "fp16"}, "guards": ISLANDS},
}
NOT_RESUMABLE = {
    "busy model": "counters and generators that no checkpoint holds",
    "data that draws": "generators of its own",
    "counting loss": "a global variable",
    "loss with a closure": "a variable outside the model",
    "subclass": "attributes of the trainer",
    "schedule and average": "as the busy model",
}


def trained(kind: str, run_dir: Path, checked: bool) -> dict[str, Any]:
    global NUM_CALLS
    NUM_CALLS = 0
    torch.manual_seed(0)
    trainer = make_trainer(**KINDS[kind]())
    trainer._run_dir = run_dir
    if checked:
        report = check(trainer, budget=20)
        assert report["readable"].status != SKIP
        assert not [checked for checked in report.checks if "the check itself failed" in checked.reason]
        if kind not in NOT_RESUMABLE:
            assert [checked.reason for checked in report.with_status(FAIL)] == []
    result = trainer.fit()
    state = deep_state(trainer)
    return {**state, "losses": list(result.losses), "random": RandomState.capture().to_plain(), "calls": NUM_CALLS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_after_a_check_is_bit_identical(kind: str, tmp_path: Path) -> None:
    without = trained(kind, tmp_path / "without", checked=False)
    after = trained(kind, tmp_path / "after", checked=True)
    assert_same(after, without)


def test_random_state_gradients_and_files_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(model=Busy())
    gradient = trainer.model.hidden.weight.grad = torch.ones_like(trainer.model.hidden.weight)
    hooks = len(trainer.model.hidden._forward_hooks)
    torch.rand(3), np.random.rand(3), random.random()
    before, state = RandomState.capture().to_plain(), deep_state(trainer)
    check(trainer, budget=20)
    assert_same(RandomState.capture().to_plain(), before)
    assert_same(deep_state(trainer), state)
    assert trainer.model.hidden.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert len(trainer.model.hidden._forward_hooks) == hooks
    assert (trainer.model.calls, trainer.model.past, trainer.model.lazy) == (0, [], None)
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def whole_state(trainer: SafeTrainer) -> dict[str, Any]:
    """All that moves with a step, and the place in the data."""
    state = TrainState.gather(trainer.stepper)
    history = trainer.stepper.history
    return copy.deepcopy(
        {
            "tensors": state.tensors,
            "rest": state.rest,
            "modes": [module.training for module in trainer.model.modules()],
            "data": trainer.stream.state_dict(),
            "history": {**history.state_dict(), "step": history.step, "epoch": history.epoch},
            "guards": [guard.name for guard in trainer.guards],
            "attributes": sorted(vars(trainer.stepper)),
        }
    )


def test_what_the_step_holds_is_restored_after_it_was_meddled_with(tmp_path: Path) -> None:
    """From the middle of a training: with moments, baselines of guards, and a schedule and a loss scale that have moved."""
    options = {"loop": {"precision": "fp16", "ema": 0.9}, "scheduler": COSINE}
    other = make_trainer(model=Busy(), **options)
    other._run_dir = tmp_path / "run"
    other.config.loop.max_steps = 12
    other.fit()
    trainer = make_trainer(model=Busy(), cls=Meddling, **options)
    TrainState.gather(other.stepper).restore_training(trainer.stepper)
    trainer.stream.load_state_dict(other.stream.state_dict())
    before = whole_state(trainer)
    assert before["data"]["num_consumed"] > 0
    assert any(name.endswith("exp_avg") for name in before["tensors"])
    report = check(trainer, budget=20)
    assert not [checked for checked in report.checks if "the check itself failed" in checked.reason]
    assert report["overfit_batch"].status != SKIP
    assert_same(whole_state(trainer), before)
    assert not trainer.has_run


class Asking(SafeTrainer):
    """Looks at the run and its guards."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.has_run
        scale = 1 + 0.01 * min(self.step, 5) + 0.001 * len(self.run.result.incidents) + 0.001 * min(self.run.step, 5)
        if any(guard.name == "spike" for guard in self.guards) and self.guard("backoff").level.scale < 1:
            scale *= 0.5
        return cross_entropy(model, batch) * scale


def test_a_step_may_look_at_the_run_and_its_guards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(cls=Asking)
    report = check(trainer, budget=20)
    assert {checked.name: checked.reason for checked in report.checks if checked.status == FAIL} == {}
    assert {checked.name for checked in report.with_status(SKIP)} == {"padding", "singular_points", "evaluation"}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="there is no run yet"):
        trainer.run  # noqa: B018
    assert trainer.fit().steps == 24


class Constructed(SafeTrainer):
    """Its own constructor takes other arguments, and its hooks would be noticed."""

    def __init__(self, factor: float, calls: list[str]) -> None:
        self.factor, self.calls = factor, calls
        x, y = make_data()
        model, data = nn.Linear(NUM_FEATURES, NUM_CLASSES), TensorDataset(x, y)
        super().__init__(model, train_data=data, eval_data=data, config=QUICK)

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return self.factor * cross_entropy(model, batch)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        self.calls.append("build_scheduler")
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def on_commit(self, view: Any) -> None:
        self.calls.append("on_commit")


QUICK = {"loop": {"max_steps": 4}, "data": {"batch_size": 16}, "logging": {"console": "off", "tensorboard": False}}


def test_a_trainer_with_a_constructor_of_its_own_is_resumed() -> None:
    calls: list[str] = []
    trainer = Constructed(0.5, calls)
    report = check(trainer, only="resume", budget=20)
    assert report["resume"].status == PASS, report["resume"].reason
    assert calls == ["build_scheduler"]


def test_a_failing_check_changes_nothing() -> None:
    x, y = make_data()
    x[5] = torch.nan
    trainer = make_trainer(TensorDataset(x, y), Busy())
    state = deep_state(trainer)
    assert not check(trainer, budget=20)
    assert_same(deep_state(trainer), state)
    assert int(x.isnan().any(1).sum()) == 1


def test_a_one_shot_iterator_is_not_consumed(tmp_path: Path) -> None:
    trainer = make_trainer(iter(batches()), loop={"max_steps": None, "max_epochs": 1})
    trainer._run_dir = tmp_path / "run"
    report = check(trainer)
    assert report.passed
    assert report["readable"].status == SKIP
    assert "only once" in report["readable"].reason
    assert report["weights_finite"].status == "PASS"
    assert trainer.fit().steps == len(batches())


def test_a_check_after_fit_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(loop={"max_steps": 1})
    trainer._run_dir = tmp_path / "run"
    trainer.fit()
    with pytest.raises(UsageError, match="already called"):
        check(trainer)
