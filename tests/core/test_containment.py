"""What raises in safetrain's own parts does not end a run; what the user's parts raise does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain import Guard, SafeTrainer, Verdict
from safetrain.core import containment
from safetrain.guards.spike import Spike
from safetrain.recovery.investigation import Investigator
from safetrain.recovery.last_good import LastGood
from safetrain.recovery.prevalence import Prevalence
from safetrain.recovery.rungs import Samples
from safetrain.telemetry.tensorboard import TensorBoard

Make = Callable[..., SafeTrainer]


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment, "strict", False)


def data(bad: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(12)]
    batches[bad][0][1, 2] = float("nan")
    return batches


def broken(*arguments: Any, **more: Any) -> Any:
    raise ZeroDivisionError("a mistake of ours")


def train(make: Make, run_dir: Path, **more: Any) -> tuple[Any, str]:
    result = make(train_data=data(), run_dir=run_dir, **more).fit()
    return result, (run_dir / "journal.jsonl").read_text()


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Spike, "judge"),
        (Spike, "learn"),
        (Spike, "limits"),
        (Spike, "attach"),
        (Spike, "state_dict"),
        (Investigator, "_diagnose"),
        (Prevalence, "note"),
        (LastGood, "committed"),
        (Samples, "climb"),
        (Samples, "fits"),
        (TensorBoard, "logged"),
    ],
)
def test_a_part_of_ours_that_raises_is_reported_and_done_without(
    owner: Any, method: str, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, broken)
    result, journal = train(make_trainer, tmp_path / "run", config={"logging": {"console": "off"}})
    assert (result.attempted, result.steps + result.skipped) == (12, 12)
    assert len(result.incidents) == 1
    notes = [line["text"] for line in map(json.loads, journal.splitlines()) if line["event"] == "note"]
    (told,) = [note for note in notes if "mistake in safetrain" in note]
    assert "Traceback (most recent call last)" in told
    assert "a mistake of ours" in told


def test_in_strict_mode_it_is_raised(make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spike, "judge", broken)
    monkeypatch.setattr(containment, "strict", True)
    with pytest.raises(ZeroDivisionError):
        train(make_trainer, tmp_path / "run")


def test_a_step_that_is_not_finite_is_refused_even_if_the_guard_for_it_is_broken(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetrain.guards.finite import Finite

    monkeypatch.setattr(Finite, "judge", broken)
    trainer = make_trainer(train_data=data(), run_dir=tmp_path / "run")
    result = trainer.fit()
    assert len(result.incidents) == 1
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


class Theirs(Guard):
    def judge(self, view: Any) -> Verdict:
        raise ZeroDivisionError("a mistake of the user's")


def test_a_guard_of_the_users_is_the_users_code(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        train(make_trainer, tmp_path / "run", guards=[Theirs()])
