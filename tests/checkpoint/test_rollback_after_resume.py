"""A rollback after a resume goes where the uninterrupted run went, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safetrain import Action, Guard, SafeTrainer, Verdict
from safetrain.checkpoint import CheckpointStore
from safetrain.errors import Interrupted, TrainingStopped
from scripts.chaos import differences

Make = Callable[..., SafeTrainer]


class Troubled(Guard):
    """Asks for a rollback at these attempted steps."""

    name = "troubled"

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def judge(self, view: Any) -> Verdict:
        if view.step in self.steps:
            return Verdict(
                Action.ROLLBACK,
                reason="asked for",
                evidence={"signal": "loss", "value": view.loss},
                bad_state={"x": "bad"},
            )
        return Verdict()


class Paused(SafeTrainer):
    pause_at: int | None = None

    def on_commit(self, view: Any) -> None:
        if view.step == self.pause_at:
            self.run.signal = 15


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(60)]


def train(
    make: Make, run_dir: Path, steps: tuple[int, ...], pauses: tuple[int, ...] = (), **checkpoint: Any
) -> SafeTrainer:
    """The run, ended and resumed after each of the pauses."""
    for pause in (*pauses, None):
        torch.manual_seed(3)
        trainer = make(
            cls=Paused,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            train_data=data(),
            guards=[Troubled(steps)],
            config={
                "loop": {"max_steps": 40, "device": "cpu", "ema": 0.9},
                "checkpoint": {"every_steps": 7, "snapshot_every": 4, "trust_after": 3, "keep_last": 4, **checkpoint},
                "recovery": {"max_rollbacks": 20, "max_refusals": 50},
            },
            run_dir=run_dir,
        )
        trainer.pause_at = pause
        if pause is None:
            trainer.fit(resume="auto")
        else:
            with pytest.raises(Interrupted):
                trainer.fit(resume="auto")
    return trainer


@pytest.mark.parametrize("checkpoint", [{}, {"async": True}, {"every_steps": 4}, {"every_steps": 1}], ids=str)
def test_the_run_ends_where_the_uninterrupted_one_ends(
    make_trainer: Make, tmp_path: Path, checkpoint: dict[str, Any]
) -> None:
    steps = (18, 19, 20, 33, 34)
    whole = train(make_trainer, tmp_path / "whole", steps, **checkpoint)
    assert whole.run.result.rollbacks == len(steps)
    train(make_trainer, tmp_path / "pieces", steps, (9, 17, 21, 31), **checkpoint)
    # A pause leaves a checkpoint that the uninterrupted run has not; a rollback past it notes that it is spoiled.
    found = differences(tmp_path / "whole", tmp_path / "pieces")
    assert [each for each in found if not each.startswith("rest.ring.used")] == []
    final = [(tmp_path / name / "checkpoints" / "final.safetensors").read_bytes() for name in ("whole", "pieces")]
    assert final[0] == final[1]


def test_only_the_snapshots_of_the_newest_checkpoint_stay_and_twins_take_no_room(
    make_trainer: Make, tmp_path: Path
) -> None:
    train(make_trainer, tmp_path / "run", (), every_steps=4)
    kept = CheckpointStore(tmp_path / "run" / "snapshots").paths()
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").load_newest()
    assert newest is not None
    listed = {
        f"step-{each['step']:08d}" for each in newest.state.rest["ring"]["snapshots"] if not each["is_checkpoint"]
    }
    assert {path.name for path in kept} == listed
    assert len(listed) >= 3
    twins = [path for path in kept if (path / "model.safetensors").stat().st_nlink > 1]
    assert len(twins) >= 2


def test_when_memory_has_nothing_older_the_disk_has(make_trainer: Make, tmp_path: Path) -> None:
    """Trouble comes back after every rollback: the run goes to older and older states, each once, before it gives up."""
    with pytest.raises(TrainingStopped):
        train(make_trainer, tmp_path / "run", tuple(range(30, 200)), (28,), save_snapshots=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    went_to = [line["to_step"] for line in lines if line["event"] == "rollback"]
    assert went_to[:3] == sorted(went_to[:3], reverse=True)
    assert len(set(went_to)) >= 3


def test_a_missing_snapshot_is_said(make_trainer: Make, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    sections = {"checkpoint": {"snapshot_every": 2}}
    paused = make_trainer(cls=Paused, train_data=data(), run_dir=run_dir, config=sections)
    paused.pause_at = 9
    with pytest.raises(Interrupted):
        paused.fit()
    shutil.rmtree(run_dir / "snapshots")
    make_trainer(train_data=data(), run_dir=run_dir, config=sections).fit(resume=True)
    assert "snapshots from before this resume are missing" in (run_dir / "journal.jsonl").read_text()
