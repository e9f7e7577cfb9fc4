"""FSDP2: a model spread over two processes is clipped, refused, saved, resumed and spread anew as safely as a whole one."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from process_group import outcomes_of, run_ranks
from safetensors.torch import load_file, load_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from safetrain import SafeTrainer
from safetrain.checkpoint import CheckpointStore
from safetrain.checkpoint.export import export_weights
from safetrain.tensors.sharded import full_tensor, is_dtensor, is_sharded, local


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, inputs):
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Net(nn.Module):
    """Parameters whose first dimension is odd, or smaller than the number of processes; weights that are tied; a buffer."""

    def __init__(self, width=7):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(width, 1)

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(self.dropout(self.batch_norm(hidden)))


class Samples(Dataset):
    def __init__(self, length=56, bad=()):
        generator = torch.Generator().manual_seed(8)
        self.inputs = torch.randn(length, 6, generator=generator)
        self.targets = torch.randn(length, 1, generator=generator)
        self.inputs[list(bad)] = float("nan")

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Gone(BaseException):
    """Ends a run as if the process had gone: nothing in the trainer handles this."""


class Ending(SafeTrainer):
    ends_after = None

    def on_commit(self, view):
        if self.run.result.steps == self.ends_after:
            raise Gone


def loss_fn(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets)


def make_trainer(run_dir, rank=0, bad=(), ends_after=None, kind=Ending, **sections):
    torch.manual_seed(4 + rank)  # only the model of process 0 counts
    model = Net()
    config = {
        "name": "spread",
        "seed": 3,
        "data": {"batch_size": 4, **sections.pop("data", {})},
        "loop": {"max_epochs": 1, "device": "cpu", "strategy": "fsdp", **sections.pop("loop", {})},
        "checkpoint": {"every_steps": 2, **sections.pop("checkpoint", {})},
        "guards": {"clip": {"max_norm": 0.5}, **sections.pop("guards", {})},
        "logging": {"console": "off", "tensorboard": False},
        **sections,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = kind(
        model, loss_fn=loss_fn, optimizer=optimizer, train_data=Samples(bad=bad), config=config, run_dir=run_dir
    )
    trainer.ends_after = ends_after
    return trainer


def whole_state(trainer):
    """Equal on all processes, but for their own buffers and random state."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {
        "model": {name: full_tensor(value.detach()).clone() for name, value in trainer.model.named_parameters()},
        "moments": [full_tensor(value).clone() for value in moments],
        "buffers": {name: value.clone() for name, value in trainer.model.named_buffers()},
        "average": {} if trainer.ema is None else {n: full_tensor(v).clone() for n, v in trainer.ema.weights.items()},
        "random": torch.get_rng_state(),
        "losses": list(trainer.run.result.losses or trainer.run._losses),
    }


def train(rank, run_dir, options, resume=False):
    trainer = make_trainer(run_dir, rank, **options)
    assert is_sharded(trainer.model) == torch.distributed.is_initialized()
    with contextlib.suppress(Gone):
        trainer.fit(resume=resume)
    return whole_state(trainer)


def assert_same(left, right):
    for part in ("model", "buffers", "average"):
        assert left[part].keys() == right[part].keys()
        assert all(torch.equal(left[part][name], right[part][name]) for name in left[part]), part
    assert all(torch.equal(a, b) for a, b in zip(left["moments"], right["moments"], strict=True))
    assert left["losses"] == right["losses"]


def assert_close(left, right):
    for name in left["model"]:
        torch.testing.assert_close(left["model"][name], right["model"][name], rtol=1e-4, atol=1e-5)
    for one, other in zip(left["moments"], right["moments"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


# ---- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guards", "accumulate"),
    [({}, 2), pytest.param({"clip": {"mode": "value", "max_value": 0.01}}, 1, marks=pytest.mark.slow)],
)
def test_a_spread_model_learns_what_a_whole_one_does(tmp_path, guards, accumulate):
    options = {"guards": guards, "loop": {"grad_accum": accumulate}}
    spread = run_ranks(train, 2, tmp_path / "fsdp", options)
    replicated = run_ranks(train_replicated, 2, tmp_path / "ddp", options)
    assert_close(spread[0], replicated[0])
    assert all(torch.equal(spread[0]["model"][name], spread[1]["model"][name]) for name in spread[0]["model"])
    assert spread[0]["losses"] == spread[1]["losses"]
    assert spread[0]["losses"] == pytest.approx(replicated[0]["losses"], rel=1e-4)


def train_replicated(rank, run_dir, options):
    options = {**options, "loop": {**options["loop"], "strategy": "ddp"}}
    trainer = make_trainer(run_dir, rank, **options)
    assert not is_sharded(trainer.model)
    trainer.fit()
    return whole_state(trainer)


class Watching(Ending):
    """Compares this process's parts before and after each refused step, bit for bit."""

    def run_step(self, window):
        before = [local(value).clone() for value in self._lasting()]
        super().run_step(window)
        if self.run.result.incidents and self.run.result.incidents[-1].step == self.run.step - 1:
            after = [local(value) for value in self._lasting()]
            self.num_compared = getattr(self, "num_compared", 0) + 1
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def _lasting(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *self.model.buffers(), *moments]


def refuse(rank, run_dir, bad):
    trainer = make_trainer(
        run_dir, rank, bad=bad, kind=Watching, data={"shuffle": False}, recovery={"heal": []}, loop={"ema": 0.9}
    )
    result = trainer.fit()
    outcome = (result.steps, result.skipped, [incident.step for incident in result.incidents])
    guilty = [incident.rank for incident in result.incidents]
    return outcome, trainer.num_compared, guilty, whole_state(trainer)


@pytest.mark.parametrize("guilty", [0, 1])
def test_what_is_bad_on_one_process_is_refused_by_all(tmp_path, guilty):
    first, second = run_ranks(refuse, 2, tmp_path / "run", range(16 + 4 * guilty, 20 + 4 * guilty))
    assert first[0] == second[0] == (6, 1, [2])
    assert first[1] == second[1] == 1
    assert first[2] == second[2] == [guilty]
    assert all(torch.equal(first[3]["model"][name], second[3]["model"][name]) for name in first[3]["model"])


def ruin(rank, run_dir, owner):
    trainer = make_trainer(run_dir, rank, checkpoint={"snapshot_every": 2, "trust_after": 0}, kind=Ruined)
    trainer.owner = owner
    result = trainer.fit()
    assert all(bool(local(p).isfinite().all()) for p in trainer.model.parameters())
    return result.rollbacks, result.steps, [incident.step for incident in result.incidents], whole_state(trainer)


class Ruined(Ending):
    """One process's part of a weight goes bad once."""

    owner, done = 0, False

    def on_commit(self, view):
        if view.step == 2 and not self.done:
            self.done = True
            if self.engine.rank == self.owner:
                local(self.model.first.weight).fill_(float("nan"))


@pytest.mark.parametrize("owner", [0, 1])
def test_a_bad_part_takes_all_back(tmp_path, owner):
    first, second = run_ranks(ruin, 2, tmp_path / "run", owner)
    assert first[:3] == second[:3]
    assert first[0] == 1
    assert all(torch.equal(first[3]["model"][name], second[3]["model"][name]) for name in first[3]["model"])


# ---- precision --------------------------------------------------------------------------------------------------------


class Noting(Ending):
    """Notes in which types the modules compute."""

    def training_step(self, model, batch):
        self.types = {}
        names = ("first", "blocks.0.linear", "blocks.1.norm", "last")
        handles = [self.model.get_submodule(name).register_forward_pre_hook(self._note(name)) for name in names]
        try:
            return super().training_step(model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name):
        def hook(module, args):
            self.types[name] = (args[0].dtype, module.weight.dtype)

        return hook


def types_of(rank, run_dir, options):
    trainer = make_trainer(run_dir, rank, kind=Noting, **options)
    trainer.fit()
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    return trainer.types, whole_state(trainer)


def test_islands_are_units_of_their_own(tmp_path):
    options = {
        "loop": {"precision": "bf16", "shard_dtype": "bf16", "shard_blocks": ["Block"]},
        "guards": {"islands": {"modules": ["blocks.1", "last"]}},
    }
    (types, first), (_, second) = run_ranks(types_of, 2, tmp_path / "run", options)
    assert types["first"][1] == types["blocks.0.linear"][1] == torch.bfloat16
    assert types["blocks.1.norm"] == (torch.float32, torch.float32)
    assert types["last"][1] == torch.float32
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(tmp_path, precision):
    options = {"loop": {"precision": precision}}
    spread = run_ranks(train, 2, tmp_path / "fsdp", options)
    replicated = run_ranks(train_replicated, 2, tmp_path / "ddp", options)
    assert spread[0]["losses"] == spread[1]["losses"]
    assert spread[0]["losses"] == pytest.approx(replicated[0]["losses"], rel=0.05)


# ---- state ------------------------------------------------------------------------------------------------------------

EMA = {"loop": {"ema": 0.9}}


@pytest.mark.parametrize("background", [False, True])
def test_resume_is_bit_exact_with_as_many_processes(tmp_path, background):
    options = {**EMA, "checkpoint": {"async": background}}
    expected = run_ranks(train, 2, tmp_path / "whole", options)
    run_ranks(train, 2, tmp_path / "run", {**options, "ends_after": 3})
    assert_written_in_parts(tmp_path / "run")
    resumed = run_ranks(train, 2, tmp_path / "run", options, True)
    for rank in range(2):
        assert_same(resumed[rank], expected[rank])
        assert torch.equal(resumed[rank]["random"], expected[rank]["random"])
    differing = {
        name for name, value in expected[0]["buffers"].items() if not torch.equal(value, expected[1]["buffers"][name])
    }
    assert differing == {"batch_norm.running_mean", "batch_norm.running_var"}


def assert_written_in_parts(run_dir):
    for path in CheckpointStore(run_dir / "checkpoints").paths():
        files = json.loads((path / "manifest.json").read_text())["files"]
        assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"]


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), (1, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 3), (3, 2)))]
)
def test_another_number_of_processes_takes_over(tmp_path, before, after):
    def run(count, options, resume=False):
        if count == 1:
            return train(0, tmp_path / "run", options, resume)
        return run_ranks(train, count, tmp_path / "run", options, resume)[0]

    first = run(before, {**EMA, "ends_after": 2, "checkpoint": {"every_steps": 1}})
    # The state of the first step was saved; nothing is left to do but to load and save it again.
    again = run(after, {**EMA, "loop": {"max_steps": 1, "max_epochs": None, "ema": 0.9}}, True)
    assert again["losses"] == first["losses"][:1]
    run(after, EMA, True)
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").load_newest()
    assert newest.state.tensors["model/first.weight"].shape == (7, 6)
    assert all(bool(value.isfinite().all()) for value in newest.state.part("model").values())


def loaded_state(rank, run_dir):
    trainer = make_trainer(run_dir, rank, loop={"ema": 0.9, "max_steps": 2, "max_epochs": None})
    trainer.fit(resume=True)
    return whole_state(trainer)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_the_state_is_the_same_however_it_is_spread(tmp_path, before, after):
    options = {"loop": {"ema": 0.9, "max_steps": 2, "max_epochs": None}}

    def run(function, count, *args):
        return (
            [function(0, tmp_path / "run", *args)]
            if count == 1
            else run_ranks(function, count, tmp_path / "run", *args)
        )

    saved = run(train, before, options)
    for loaded in run(loaded_state, after):
        assert_same(loaded, saved[0])


def damage(run_dir, name):
    path = CheckpointStore(Path(run_dir) / "checkpoints").paths()[-1]
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    return path.name


@pytest.mark.parametrize("part", ["__1_0.distcp", ".metadata"])
def test_all_fall_back_from_a_damaged_part(tmp_path, part):
    run_ranks(train, 2, tmp_path / "run", {"ends_after": 5})
    name = damage(tmp_path / "run", part)
    expected = run_ranks(train, 2, tmp_path / "whole", {})
    resumed = run_ranks(train, 2, tmp_path / "run", {}, True)
    assert (tmp_path / "run" / "checkpoints" / f"{name}.damaged").is_dir()
    assert_same(resumed[0], expected[0])


def fail_to_write(rank, run_dir, guilty):
    import os

    trainer = make_trainer(run_dir, rank, checkpoint={"on_error": "stop"})
    original = os.fsync

    def full(descriptor):
        if trainer._run is not None and trainer.run.result.steps >= 2:
            raise OSError(28, "No space left on device")
        original(descriptor)

    if rank == guilty:
        os.fsync = full
    trainer.fit()


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_part_that_cannot_be_written_is_an_error_on_all(tmp_path, guilty):
    outcomes = outcomes_of(fail_to_write, 2, tmp_path / "run", guilty)
    assert [outcome.error for outcome in outcomes] == ["CheckpointError"] * 2
    assert all("No space left" in outcome.message for outcome in outcomes)
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.is_symlink()]
    assert names == ["step-00000000"]


def test_final_weights_and_export_load_in_one_process(tmp_path):
    states = run_ranks(train, 2, tmp_path / "run", EMA)
    checkpoints = tmp_path / "run" / "checkpoints"
    export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    exported = load_file(tmp_path / "out.safetensors")
    expected = {**states[0]["model"], **states[0]["buffers"]}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    model = Net()
    load_model(model, checkpoints / "final.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    load_model(model, checkpoints / "final_ema.safetensors")
    assert all(torch.equal(value, states[0]["average"][name]) for name, value in model.named_parameters())


def go_back(rank, run_dir, to):
    trainer = make_trainer(
        run_dir, rank, kind=GoingBack, checkpoint={"snapshot_every": 2, "trust_after": 0, "every_steps": 2}
    )
    trainer.to = to
    result = trainer.fit()
    return trainer.went_to, result.rollbacks, whole_state(trainer)


class GoingBack(Ending):
    """Goes back once, between two steps, as a recovery does."""

    to, went_to = "trusted", None

    def _evaluate_if_due(self, **moment):
        if self.run.result.steps == 2 and self.went_to is None:
            self.after_two = [local(value).clone() for value in self.model.parameters()]
        if self.run.result.steps == 3 and self.went_to is None:
            self.went_to = self.rollback(self.to)
            now = [local(value) for value in self.model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(self.after_two, now, strict=True))


@pytest.mark.parametrize("to", ["trusted", "disk"])
def test_all_go_back_together(tmp_path, to):
    first, second = run_ranks(go_back, 2, tmp_path / "run", to)
    assert first[:2] == second[:2] == (2, 1)
    assert all(torch.equal(first[2]["model"][name], second[2]["model"][name]) for name in first[2]["model"])


def used_optimizer(rank):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    SafeTrainer(
        model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=Samples(),
        config={"loop": {"strategy": "fsdp", "device": "cpu"}},
    )


def test_an_optimizer_that_was_used_cannot_be_taken_over():
    outcomes = outcomes_of(used_optimizer, 2)
    assert [outcome.error for outcome in outcomes] == ["UsageError"] * 2
    assert "To fix" in outcomes[0].message


def test_a_tensor_of_one_process_is_all_here():
    tensor = torch.randn(3)
    assert not is_dtensor(tensor)
    assert local(tensor) is tensor
    assert full_tensor(tensor) is tensor
