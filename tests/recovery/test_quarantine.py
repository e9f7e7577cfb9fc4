"""A sample that keeps causing incidents is excluded from later epochs by its index, also after a resume."""

import json
import math

import pytest
import torch
from checkpoint_cases import Gone
from small import assert_same, make_model
from torch.utils.data import DataLoader, TensorDataset

from safetrain import SafeTrainer
from safetrain.data.quarantine import Quarantine

BAD = (5, 20)


class Seeing(SafeTrainer):
    """Keeps which samples each committed step was trained on, and may die after one."""

    die_at = None

    def training_step(self, model, batch):
        self.batch = batch
        return super().training_step(model, batch)

    def on_commit(self, view):
        vars(self).setdefault("epochs", {}).setdefault(self.stream.epoch, []).extend(self.batch[1][:, 0].tolist())
        if view.step == self.die_at:
            raise Gone


def make_data(num=31):
    """A data set whose targets are the indices of its samples; of two of them the inputs are NaN."""
    inputs, targets = torch.randn(num, 6), torch.arange(num, dtype=torch.float32)[:, None]
    inputs[list(BAD)] = math.nan
    return TensorDataset(inputs, targets)


CONFIG = {
    "seed": 3,
    "loop": {"max_epochs": 4},
    "data": {"batch_size": 4},
    "checkpoint": {"every_steps": 3},
    "forensics": {"remedies": False},
}


def lines_of(trainer):
    path = trainer.run.dir / "quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_after_two_incidents_a_sample_is_left_out(make_trainer, shuffle, workers):
    config = {**CONFIG, "data": {"batch_size": 4, "shuffle": shuffle, "num_workers": workers}}
    trainer = make_trainer(model=make_model(0.0, norm=False), cls=Seeing, train_data=make_data(), config=config)
    result = trainer.fit()
    assert len(result.incidents) == 4  # twice each
    assert sorted(result.quarantined) == list(BAD)
    lines = lines_of(trainer)
    assert [line["id"] for line in lines] == result.quarantined
    for line in lines:
        assert line.keys() == {"id", "step", "epoch", "count", "reason"}
        assert (line["epoch"], line["count"], line["reason"]) == (1, 2, "finite: the loss is nan")
        reasons = next(i.decision.reasons for i in result.incidents if i.step == line["step"])
        caused = f"quarantine: sample {line['id']} of the data set has caused 2 incidents"
        assert f"{caused}: it is left out of later epochs" in reasons
    # Every other sample is visited once an epoch, whatever was left out.
    healthy = [float(index) for index in range(31) if index not in BAD]
    assert all(sorted(trainer.epochs[epoch]) == healthy for epoch in range(4))
    assert json.loads((result.run_dir / "summary.json").read_text())["quarantined"] == result.quarantined


@pytest.mark.parametrize("die_at", [7, 12, 19])
def test_a_resume_visits_the_same_samples(make_trainer, tmp_path, die_at):
    """Wherever the run died: before, in or after the epoch in which a sample was quarantined."""
    trainers = []
    for name, deaths in (("whole", [None]), ("pieces", [die_at, None])):
        for life, death in enumerate(deaths):
            torch.manual_seed(1)
            parts = {"model": make_model(dropout=0.0), "config": CONFIG, "run_dir": tmp_path / name}
            torch.manual_seed(0)
            trainer = make_trainer(cls=Seeing, train_data=make_data(), **parts)
            trainer.die_at = death
            if death is not None:
                with pytest.raises(Gone):
                    trainer.fit()
            else:
                trainer.fit(resume=life > 0)
        trainers.append(trainer)
    whole, pieces = trainers
    assert lines_of(whole) == lines_of(pieces)
    assert len(lines_of(whole)) == 2
    assert repr(whole.run.result.losses) == repr(pieces.run.result.losses)
    assert_same(whole.model.state_dict(), pieces.model.state_dict())


def test_with_accumulation_the_right_sample_is_quarantined(make_trainer):
    config = {**CONFIG, "loop": {"max_epochs": 3, "grad_accum": 3}}
    result = make_trainer(train_data=make_data(), config=config).fit()
    assert sorted(result.quarantined) == list(BAD)


def test_samples_found_by_the_batch_guard_count_too(make_trainer):
    """All of a batch may be bad data."""
    data = make_data(32)
    data.tensors[0][8:12] = math.nan
    config = {**CONFIG, "data": {"batch_size": 4, "shuffle": False}, "guards": {"batch": {}}}
    result = make_trainer(train_data=data, config=config).fit()
    assert set(result.quarantined) == {8, 9, 10, 11, *BAD}
    assert [i.decision.action for i in result.incidents].count("skip") == 2


@pytest.mark.parametrize(
    ("recovery", "as_batches"), [({"heal": []}, False), ({"quarantine_after": None}, False), ({}, True)]
)
def test_nothing_is_quarantined_without_heal_or_sample_indices(make_trainer, recovery, as_batches):
    data = list(DataLoader(make_data(), batch_size=4)) if as_batches else make_data()
    trainer = make_trainer(train_data=data, config=CONFIG, recovery=recovery)
    result = trainer.fit()
    assert len(result.incidents) == 8
    assert result.quarantined == []
    assert lines_of(trainer) is None
    assert not any("quarantine" in reason for i in result.incidents for reason in i.decision.reasons)


def test_loading_a_state_releases_samples_quarantined_after_it(tmp_path):
    quarantine = Quarantine(2, tmp_path)
    assert quarantine.note([3, 4], 10, 0, "bad") == [
        "sample 3 of the data set has caused 1 of 2 incidents",
        "sample 4 of the data set has caused 1 of 2 incidents",
    ]
    state = json.loads(json.dumps(quarantine.state_dict()))
    quarantine.note([3], 20, 1, "bad")
    assert (quarantine.ids, (tmp_path / "quarantine.jsonl").read_text().count("\n")) == ([3], 1)
    quarantine.load_state_dict(state)
    assert quarantine.ids == []
    assert not (tmp_path / "quarantine.jsonl").exists()
    quarantine.note([4, 4], 21, 1, "bad again")  # later incidents of the same epoch do not list it twice
    assert quarantine.ids == [4]
