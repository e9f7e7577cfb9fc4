"""Checkpoints of several processes, with a replicated (ddp) and a sharded model (fsdp): written, damaged, resumed by any number."""

import json
import os
from pathlib import Path

import pytest
import torch
from process_group import outcomes_of, run_ranks
from rank_runs import Ending, Net, Samples, assert_same_state, make_trainer, train, whole_state
from safetensors.torch import load_file, load_model

from safetrain.checkpoint import CheckpointStore
from safetrain.checkpoint.export import export_weights
from safetrain.tensors.sharded import local

DDP, FSDP = {"strategy": "ddp", "seed": None}, {"strategy": "fsdp"}
EMA = {"loop": {"ema": 0.9}}


def paths_of(run_dir):
    return CheckpointStore(Path(run_dir) / "checkpoints").paths()


def run(function, count, *args):
    """In this process if `count` is 1."""
    return [function(0, *args)] if count == 1 else run_ranks(function, count, *args)


# ---- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "accumulate"),
    [(2, 2), (3, 1), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_resume_of_a_replicated_model_is_bit_exact(tmp_path, num_ranks, accumulate):
    options = {**DDP, "loop": {"grad_accum": accumulate, "max_epochs": 2}}
    whole = run_ranks(train, num_ranks, tmp_path / "whole", options)
    run_ranks(train, num_ranks, tmp_path / "run", {**options, "ends_after": 3})
    resumed = run_ranks(train, num_ranks, tmp_path / "run", options, True)
    for rank in range(num_ranks):
        # The buffers of rank 0 are those of the run.
        assert_same_state(resumed[rank], whole[rank], ("model", "buffers") if rank == 0 else ("model",))
        assert torch.equal(resumed[rank]["random"], whole[rank]["random"])
    assert not torch.equal(whole[0]["random"], whole[1]["random"])


@pytest.mark.parametrize("background", [False, True])
def test_resume_of_a_sharded_model_is_bit_exact(tmp_path, background):
    options = {**FSDP, **EMA, "checkpoint": {"async": background}}
    expected = run_ranks(train, 2, tmp_path / "whole", options)
    run_ranks(train, 2, tmp_path / "run", {**options, "ends_after": 3})
    for path in paths_of(tmp_path / "run"):
        files = json.loads((path / "manifest.json").read_text())["files"]
        assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]
    resumed = run_ranks(train, 2, tmp_path / "run", options, True)
    for rank in range(2):
        assert_same_state(resumed[rank], expected[rank])
        assert torch.equal(resumed[rank]["random"], expected[rank]["random"])
    differing = {
        name for name, value in expected[0]["buffers"].items() if not torch.equal(value, expected[1]["buffers"][name])
    }
    assert differing == {"batch_norm.running_mean", "batch_norm.running_var"}


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_processes_continues_the_epoch(tmp_path, before, after):
    options = {**DDP, "samples": Samples(48)}
    first = run(train, before, tmp_path / "run", {**options, "ends_after": 3})  # saved after the second step
    second = run(train, after, tmp_path / "run", options, True)
    steps = [step for each in first for step in each["seen"][:2]] + [step for each in second for step in each["seen"]]
    assert sorted(sample for step in steps for sample in step) == list(range(48))
    assert second[0]["losses"][:2] == first[0]["losses"][:2]
    assert len({tuple(each["losses"]) for each in second}) == 1


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), (1, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 3), (3, 2)))]
)
def test_another_number_of_processes_resumes_a_sharded_model(tmp_path, before, after):
    options = {**FSDP, **EMA}
    first = run(train, before, tmp_path / "run", {**options, "ends_after": 2, "checkpoint": {"every_steps": 1}})[0]
    # The state of the first step was saved; this run only loads it and saves it again.
    ended = {**options, "loop": {"max_steps": 1, "max_epochs": None, "ema": 0.9}}
    again = run(train, after, tmp_path / "run", ended, True)[0]
    assert again["losses"] == first["losses"][:1]
    run(train, after, tmp_path / "run", options, True)
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").load_newest()
    assert newest.state.tensors["model/first.weight"].shape == (7, 6)
    assert all(bool(value.isfinite().all()) for value in newest.state.part("model").values())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_the_state_is_the_same_however_it_is_sharded(tmp_path, before, after):
    options = {**FSDP, "loop": {"ema": 0.9, "max_steps": 2, "max_epochs": None}}
    saved = run(train, before, tmp_path / "run", options)
    for loaded in run(train, after, tmp_path / "run", options, True):
        assert_same_state(loaded, saved[0])


# ---- damage -----------------------------------------------------------------------------------------------------------


def damage(path, name):
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("options", "file"), [(DDP, "training.safetensors"), (FSDP, "__1_0.distcp"), (FSDP, ".metadata")]
)
def test_all_ranks_fall_back_from_a_damaged_checkpoint(tmp_path, options, file):
    run_ranks(train, 2, tmp_path / "run", {**options, "ends_after": 5})
    newest = paths_of(tmp_path / "run")[-1]
    damage(newest, file)
    expected = run_ranks(train, 2, tmp_path / "whole", options)
    resumed = run_ranks(train, 2, tmp_path / "run", options, True)
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert_same_state(resumed[0], expected[0])
    assert resumed[1]["losses"] == expected[1]["losses"]


def test_without_a_usable_checkpoint_all_ranks_raise_the_same_error(tmp_path):
    run_ranks(train, 2, tmp_path / "run", {**DDP, "ends_after": 3, "checkpoint": {"keep_last": 1}})
    for path in paths_of(tmp_path / "run"):
        damage(path, "training.safetensors")
    outcomes = outcomes_of(train, 2, tmp_path / "run", DDP, True)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert outcomes[0].message == outcomes[1].message
    assert "can be used" in outcomes[0].message


def fail_to_write(rank, run_dir, options, guilty):
    trainer = make_trainer(run_dir, rank, **options)
    original = os.fsync

    def full(descriptor):
        if trainer._run is not None and trainer.run.result.steps >= 2:
            raise OSError(28, "No space left on device")
        original(descriptor)

    if rank == guilty:
        os.fsync = full
    trainer.fit()


@pytest.mark.parametrize(
    ("options", "guilty", "background"), [(DDP, 0, False), (DDP, 0, True), (FSDP, 0, False), (FSDP, 1, False)]
)
def test_a_failed_write_is_an_error_on_all_ranks(tmp_path, options, guilty, background):
    options = {**options, "checkpoint": {"on_error": "stop", "async": background}}
    outcomes = outcomes_of(fail_to_write, 2, tmp_path / "run", options, guilty)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("No space left" in outcome.message for outcome in outcomes)
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.is_symlink()]
    assert names == ["step-00000000"]


def test_a_failed_write_may_be_a_warning_but_not_the_last_one(tmp_path):
    options = {**DDP, "loop": {"max_steps": 6}, "checkpoint": {"on_error": "warn", "async": False}}
    outcomes = outcomes_of(fail_to_write, 2, tmp_path / "run", options, 0)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("at step 6" in outcome.message for outcome in outcomes)
    assert [path.name for path in paths_of(tmp_path / "run")] == ["step-00000000"]


def test_an_unusable_run_directory_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "config.yaml").write_text("name: other\n")
    outcomes = outcomes_of(train, 2, tmp_path, DDP)
    assert [outcome.error for outcome in outcomes] == ["RunDirectoryError"] * 2


# ---- rollback and export ----------------------------------------------------------------------------------------------


class RollingBack(Ending):
    """Rolls back once, between two steps, as recovery does."""

    to, went_to = "trusted", None

    def on_commit(self, view):
        if self.run.result.steps == 2 and self.went_to is None:
            self.after_two = [local(value).clone() for value in self.model.parameters()]
        if self.run.result.steps == 3 and self.went_to is None:
            self.went_to = self.rollback(self.to)
            now = [local(value) for value in self.model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(self.after_two, now, strict=True))


def roll_back(rank, run_dir, to, options):
    checkpoint = {"snapshot_every": 2, "trust_after": 0}
    trainer = make_trainer(run_dir, rank, kind=RollingBack, checkpoint=checkpoint, **options)
    trainer.to = to
    result = trainer.fit()
    return trainer.went_to, result.rollbacks, whole_state(trainer)


@pytest.mark.parametrize("options", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("to", ["trusted", "disk"])
def test_all_ranks_roll_back_together(tmp_path, options, to):
    first, second = run_ranks(roll_back, 2, tmp_path / "run", to, options)
    assert first[:2] == second[:2] == (2, 1)
    assert_same_state(first[2], second[2], ("model",))


@pytest.mark.parametrize("options", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_final_weights_and_export_load_in_one_process(tmp_path, options):
    state, _ = run_ranks(train, 2, tmp_path / "run", {**options, **EMA})
    checkpoints = tmp_path / "run" / "checkpoints"
    assert export_weights(tmp_path / "run", tmp_path / "out.safetensors").which == "last"
    exported = load_file(tmp_path / "out.safetensors")
    expected = {**state["model"], **state["buffers"]}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    model = Net()
    load_model(model, checkpoints / "final.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    load_model(model, checkpoints / "final_ema.safetensors")
    assert all(torch.equal(value, state["average"][name]) for name, value in model.named_parameters())
