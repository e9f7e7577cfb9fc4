"""Several processes with the whole model each: one checkpoint for all, and a resume by as many or another number of them."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from process_group import outcomes_of, run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from safetrain import SafeTrainer
from safetrain.checkpoint import CheckpointStore
from safetrain.checkpoint.export import export_weights


class Samples(Dataset):
    """Each sample knows its index."""

    def __init__(self, length=48):
        generator = torch.Generator().manual_seed(8)
        self.inputs = torch.randn(length, 6, generator=generator)
        self.targets = torch.randn(length, 1, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index], index


class Noting(SafeTrainer):
    """Remembers which samples were trained on, and may be ended in the middle."""

    ends_after = None
    seen = ()

    def training_step(self, model, batch):
        inputs, targets, _ = batch
        return F.mse_loss(model(inputs), targets)

    def on_commit(self, view):
        self.seen = [*self.seen, [index for batch in view.window() for index in batch[2].tolist()]]
        if self.run.result.steps == self.ends_after:
            raise Gone


class Gone(BaseException):
    """Ends a run as if the process had gone: nothing in the trainer handles this."""


def make_model():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


def make_trainer(run_dir, rank=0, steps=None, ends_after=None, data=None, kind=Noting, **sections):
    torch.manual_seed(100 + rank)  # dropout masks are different on each process
    model = make_model()
    torch.manual_seed(200 + rank)
    config = {
        "name": "state",
        "data": {"batch_size": 4},
        "loop": {"max_steps": steps, "max_epochs": None if steps else 2, "device": "cpu", **sections.pop("loop", {})},
        "checkpoint": {"every_steps": 2, **sections.pop("checkpoint", {})},
        "logging": {"console": "off", "tensorboard": False},
        **sections,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Samples() if data is None else data
    trainer = kind(model, optimizer=optimizer, train_data=data, config=config, run_dir=run_dir)
    trainer.ends_after = ends_after
    return trainer


def final_state(trainer):
    optimizer = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {
        "model": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "optimizer": [value.clone() for value in optimizer],
        "random": torch.get_rng_state(),
        "losses": list(trainer.run.result.losses),
        "seen": trainer.seen,
    }


def train(rank, run_dir, options, resume=False):
    trainer = make_trainer(run_dir, rank, **options)
    with contextlib.suppress(Gone):
        trainer.fit(resume=resume)
    return final_state(trainer)


def same(left, right):
    return (
        all(torch.equal(left["model"][name], right["model"][name]) for name in left["model"])
        and all(torch.equal(a, b) for a, b in zip(left["optimizer"], right["optimizer"], strict=True))
        and torch.equal(left["random"], right["random"])
    )


@pytest.mark.parametrize(
    ("num_ranks", "accumulate"),
    [(2, 2), (3, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_resume_with_the_same_number_of_processes_is_bit_exact(tmp_path, num_ranks, accumulate):
    options = {"loop": {"grad_accum": accumulate}}
    whole = run_ranks(train, num_ranks, tmp_path / "whole", options)
    run_ranks(train, num_ranks, tmp_path / "run", {**options, "ends_after": 3})
    resumed = run_ranks(train, num_ranks, tmp_path / "run", options, True)
    for rank in range(num_ranks):
        assert resumed[rank]["losses"] == whole[rank]["losses"]
        if rank == 0:
            assert same(resumed[rank], whole[rank])
        assert torch.equal(resumed[rank]["random"], whole[rank]["random"])
        parameters = [name for name in whole[0]["model"] if "running" not in name and "num_" not in name]
        assert all(torch.equal(resumed[rank]["model"][n], whole[0]["model"][n]) for n in parameters)
    assert not torch.equal(whole[0]["random"], whole[1]["random"])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_processes_continues_the_epoch(tmp_path, before, after):
    def run(count, options, resume=False):
        if count == 1:
            return [train(0, tmp_path / "run", options, resume)]
        return run_ranks(train, count, tmp_path / "run", options, resume)

    first = run(before, {"ends_after": 3})  # saved after the second step
    second = run(after, {"loop": {"max_epochs": 1}}, True)
    steps = [step for each in first for step in each["seen"][:2]] + [step for each in second for step in each["seen"]]
    seen = [sample for step in steps for sample in step]
    assert sorted(seen) == list(range(48))
    assert second[0]["losses"][:2] == first[0]["losses"][:2]
    assert len({tuple(each["losses"]) for each in second}) == 1


def damage(run_dir, which=-1):
    newest = CheckpointStore(Path(run_dir) / "checkpoints").paths()[which]
    file = newest / "training.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    return newest.name


def test_all_ranks_fall_back_from_a_damaged_checkpoint(tmp_path):
    run_ranks(train, 2, tmp_path / "run", {"ends_after": 5})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(CheckpointStore(tmp_path / "copy" / "checkpoints").paths()[-1])
    name = damage(tmp_path / "run")
    resumed = run_ranks(train, 2, tmp_path / "run", {}, True)
    expected = run_ranks(train, 2, tmp_path / "copy", {}, True)
    assert (tmp_path / "run" / "checkpoints" / f"{name}.damaged").is_dir()
    assert same(resumed[0], expected[0])
    assert resumed[1]["losses"] == expected[1]["losses"]


def test_without_a_usable_checkpoint_all_ranks_raise_the_same_error(tmp_path):
    run_ranks(train, 2, tmp_path / "run", {"ends_after": 3, "checkpoint": {"keep_last": 1}})
    for index in range(len(CheckpointStore(tmp_path / "run" / "checkpoints").paths())):
        damage(tmp_path / "run", index)
    outcomes = outcomes_of(train, 2, tmp_path / "run", {}, True)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert outcomes[0].message == outcomes[1].message
    assert "can be used" in outcomes[0].message


def fail_to_write(rank, run_dir, on_error, background):
    options = {"checkpoint": {"on_error": on_error, "async": background, "every_steps": 2}}
    trainer = make_trainer(run_dir, rank, steps=6, **options)
    original = os.fsync

    def full(descriptor):
        if trainer._run is not None and trainer.run.result.steps >= 2:
            raise OSError(28, "No space left on device")
        original(descriptor)

    if rank == 0:
        os.fsync = full
    trainer.fit()


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_write_is_an_error_on_all_ranks(tmp_path, background):
    outcomes = outcomes_of(fail_to_write, 2, tmp_path / "run", "stop", background)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("No space left" in outcome.message for outcome in outcomes)


def test_a_failed_write_may_be_a_warning_but_not_the_last_one(tmp_path):
    outcomes = outcomes_of(fail_to_write, 2, tmp_path / "run", "warn", False)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("at step 6" in outcome.message for outcome in outcomes)
    assert [path.name for path in CheckpointStore(tmp_path / "run" / "checkpoints").paths()] == ["step-00000000"]


class GoingBack(Noting):
    """Goes back once, between two steps, as a recovery does."""

    to, went_to = "trusted", None

    def _evaluate_if_due(self, **moment):
        parameters = dict(self.model.named_parameters())
        if self.run.result.steps == 2 and self.went_to is None:
            self.after_two = {name: value.detach().clone() for name, value in parameters.items()}
        if self.run.result.steps == 3 and self.went_to is None:
            self.went_to = self.rollback(self.to)
            assert all(torch.equal(self.after_two[name], value) for name, value in parameters.items())


def roll_back(rank, run_dir, to):
    checkpoint = {"snapshot_every": 2, "trust_after": 0, "every_steps": 2}
    trainer = make_trainer(run_dir, rank, steps=4, checkpoint=checkpoint, kind=GoingBack)
    trainer.to = to
    result = trainer.fit()
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return trainer.went_to, result.rollbacks, weights


@pytest.mark.parametrize("to", ["trusted", "disk"])
def test_all_ranks_roll_back_together(tmp_path, to):
    first, second = run_ranks(roll_back, 2, tmp_path / "run", to)
    assert first[:2] == second[:2] == (2, 1)
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def in_use(rank, run_dir):
    make_trainer(run_dir, rank, steps=1).fit()


def test_an_unusable_run_directory_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "config.yaml").write_text("name: other\n")
    outcomes = outcomes_of(in_use, 2, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["RunDirectoryError"] * 2


def test_final_weights_and_export_load_in_one_process(tmp_path):
    states = run_ranks(train, 2, tmp_path / "run", {"steps": 3})
    exported = export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    assert exported.which == "last"
    for file in (tmp_path / "out.safetensors", tmp_path / "run" / "checkpoints" / "final.safetensors"):
        weights = load_file(file)
        assert all(torch.equal(weights[name], value) for name, value in states[0]["model"].items())
