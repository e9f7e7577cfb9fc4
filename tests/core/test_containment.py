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
from safetrain.core.verdict import Action, Doubt
from safetrain.guards.spike import Spike
from safetrain.recovery import recovery
from safetrain.recovery.investigation import Investigator
from safetrain.recovery.ladder import Ladder
from safetrain.recovery.last_good import LastGood
from safetrain.recovery.prevalence import Prevalence
from safetrain.recovery.rungs import Samples
from safetrain.recovery.trials import Trials
from safetrain.telemetry.tensorboard import TensorBoard
from safetrain.telemetry.vitals import Vitals

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
        (Investigator, "_note"),
        (Investigator, "state_dict"),
        (Ladder, "state_dict"),
        (recovery, "note_growth"),
        (Prevalence, "note"),
        (LastGood, "committed"),
        (Samples, "climb"),
        (Samples, "fits"),
        (TensorBoard, "__init__"),
        (TensorBoard, "logged"),
        (Vitals, "add"),
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


def test_a_checkpoint_without_the_state_of_a_broken_part_can_be_resumed(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as during:
        during.setattr(Investigator, "state_dict", broken)
        train(make_trainer, tmp_path / "run", config={"loop": {"max_steps": 8}})
    config = {"loop": {"max_steps": 11}}
    result = make_trainer(train_data=data(), run_dir=tmp_path / "run", config=config).fit(resume=True)
    assert (result.steps, len(result.incidents)) == (11, 1)


class Doubts(Guard):
    def judge(self, view: Any) -> Verdict:
        return Verdict(Action.SKIP, reason="suspect", doubt=Doubt.TRIAL) if view.step == 9 else Verdict()


class Skips(Guard):
    def judge(self, view: Any) -> Verdict:
        return Verdict(Action.SKIP, reason="suspect") if view.step == 9 else Verdict()


def test_a_suspect_step_stays_refused_where_its_trial_is_broken(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for guard in (Skips(), Doubts()):
        if isinstance(guard, Doubts):
            monkeypatch.setattr(Trials, "_harm", None)  # called after the update was applied
        torch.manual_seed(0)
        trainer = make_trainer(train_data=data(), run_dir=tmp_path / type(guard).__name__, guards=[guard])
        assert trainer.fit().skipped == 1
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert "is harmless raised TypeError" in (tmp_path / "Doubts" / "journal.jsonl").read_text()


def test_a_loss_of_the_users_that_raises_in_a_trial_ends_the_run(make_trainer: Make, tmp_path: Path) -> None:
    num_calls = 0

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 11:
            raise KeyError("of the user's")
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    with pytest.raises(KeyError, match="of the user's"):
        train(make_trainer, tmp_path / "run", guards=[Doubts()], loss_fn=loss_fn)


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
