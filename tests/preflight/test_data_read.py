"""Data of all kinds and sizes is read within the budget, and the report says how much of it was read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from preflight_cases import NUM_FEATURES, make_data, make_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from safetrain import SafeTrainer, UsageError, check
from safetrain.preflight import FAIL, PASS, SKIP, WARN

DATA_CHECKS = "readable,data_finite,data_scale,constant_features,labels,empty_samples,finite_steps"


class Huge(Dataset[Any]):
    """Ten million samples, made as they are read."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(NUM_FEATURES, generator=generator)
        return x, x[:3].argmax()


def test_large_data_is_sampled_within_the_budget() -> None:
    begin = time.process_time()
    report = check(make_trainer(Huge()), budget=4)
    assert time.process_time() - begin < 12
    assert report.passed
    numbers = report["readable"].numbers
    assert numbers["of"] == 10_000_000
    assert 16 <= numbers["seen"] < 1_000_000
    assert f"{numbers['seen']} of 10000000 samples" in report["readable"].reason


def test_checks_over_the_budget_are_skipped_with_the_reason() -> None:
    report = check(make_trainer(), budget=1e-4)
    skipped = report.with_status(SKIP)
    assert any("the budget are used up; --budget" in checked.reason for checked in skipped)
    assert report.passed


def test_the_last_batch_is_checked_early() -> None:
    class Lonely(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(NUM_FEATURES, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear((x - x.mean(0)) / (x.std(0) + 1e-3))  # of a single sample: 0/0

    x, y = make_data()
    x, y = x.repeat(40, 1), y.repeat(40)
    trainer = make_trainer(TensorDataset(x[:7665], y[:7665]), Lonely())
    found = check(trainer, only="finite_steps", budget=3)["finite_steps"]
    assert found.status == FAIL
    assert "batch 479" in found.reason


def batches() -> Iterator[Any]:
    x, y = make_data()
    yield from zip(x.split(16), y.split(16), strict=True)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x, y = make_data()
        yield from zip(x, y, strict=True)


class WhoReads(TensorDataset):
    """Fails in another process."""

    def __init__(self) -> None:
        super().__init__(*make_data())
        self.pid = os.getpid()

    def __getitem__(self, index: Any) -> Any:
        assert os.getpid() == self.pid
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "data",
    [
        lambda: list(batches()),
        lambda: batches,
        Streamed,
        lambda: DataLoader(TensorDataset(*make_data()), batch_size=16),
        lambda: DataLoader(Streamed(), batch_size=16),
        lambda: DataLoader(WhoReads(), batch_size=16, num_workers=2, persistent_workers=True),
    ],
    ids=["list", "function", "iterable data set", "loader", "loader of iterable", "loader with workers"],
)
def test_every_kind_of_data_is_read(data: Any) -> None:
    report = check(make_trainer(data()), only=DATA_CHECKS, budget=20)
    assert {checked.status for checked in report.checks} == {PASS}, str(report)
    assert report["readable"].numbers["seen"] == 192


def broken() -> Iterator[Any]:
    raise FileNotFoundError("no such shard")


@pytest.mark.parametrize(("data", "reason"), [(lambda: iter(()), "gives no batch"), (broken, "no such shard")])
def test_without_data_reading_fails_and_other_checks_are_skipped(data: Any, reason: str) -> None:
    report = check(make_trainer(data), only="readable,labels,overfit_batch", budget=5)
    assert report["readable"].status == FAIL
    assert reason in report["readable"].reason
    assert [report[name].status for name in ("labels", "overfit_batch")] == [SKIP, SKIP]


def test_fields_are_named_by_their_path() -> None:
    x, y = make_data()
    x[3, 0] = torch.inf
    rows = [{"inputs": {"x": a}, "y": b} for a, b in zip(x.split(16), y.split(16), strict=True)]

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch["inputs"]["x"]), batch["y"])

    found = check(make_trainer(rows, loss_fn=loss), only="data_finite")["data_finite"]
    assert found.numbers["field"] == "inputs.x"
    assert found.numbers["samples"] == ["row 3 of batch 0"]


@pytest.mark.parametrize(
    ("name", "spoiled", "status", "said"),
    [
        ("labels", lambda x, y: (x, torch.zeros_like(y)), FAIL, "only one class"),
        ("constant_features", lambda x, y: (torch.full_like(x, 0.5), y), FAIL, "no floating-point field differs"),
        ("data_scale", lambda x, y: (x * 1e6, y), WARN, "standardise"),
    ],
)
def test_data_without_information_or_scale(name: str, spoiled: Any, status: str, said: str) -> None:
    found = check(make_trainer(TensorDataset(*spoiled(*make_data()))), only=name)[name]
    assert found.status == status
    assert said in found.reason + found.fix


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: SafeTrainer = make_trainer()
    monkeypatch.setattr(trainer.machine, "world_size", 2)
    with pytest.raises(UsageError, match="one process"):
        check(trainer)
