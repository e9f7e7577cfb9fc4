"""FSDP2: a sharded model is clipped, refused and computed in low precision as safely as a replicated one."""

import pytest
import torch
from process_group import outcomes_of, run_ranks
from rank_runs import Ending, Net, Samples, loss_fn, make_trainer, train, whole_state

from safetrain import SafeTrainer
from safetrain.errors import UsageError
from safetrain.tensors.sharded import full_tensor, is_dtensor, local
from safetrain.trainer import fsdp


def assert_same_weights(left, right):
    assert all(torch.equal(left["model"][name], right["model"][name]) for name in left["model"])


def assert_close(left, right):
    for name in left["model"]:
        torch.testing.assert_close(left["model"][name], right["model"][name], rtol=1e-4, atol=1e-5)
    for one, other in zip(left["moments"], right["moments"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"loop": {"grad_accum": 2}}, True),
        pytest.param({"guards": {"clip": {"mode": "value", "max_value": 0.01}}}, True, marks=pytest.mark.slow),
        ({"loop": {"precision": "bf16"}}, False),
        ({"loop": {"precision": "fp16"}}, False),
    ],
)
def test_a_sharded_model_learns_like_a_replicated_one(tmp_path, options, exact):
    sharded = run_ranks(train, 2, tmp_path / "fsdp", options)
    replicated = run_ranks(train, 2, tmp_path / "ddp", {**options, "strategy": "ddp"})
    assert_same_weights(sharded[0], sharded[1])
    assert sharded[0]["losses"] == sharded[1]["losses"]
    assert sharded[0]["losses"] == pytest.approx(replicated[0]["losses"], rel=1e-4 if exact else 0.05)
    if exact:
        assert_close(sharded[0], replicated[0])


def train_where_the_mean_is_a_sum(rank, run_dir, options):
    fsdp._averages = lambda device: False  # as gloo of torch 2.8 does
    return train(rank, run_dir, options)


def test_gradients_are_averaged_where_the_backend_only_adds(tmp_path):
    options = {"loop": {"max_steps": 3}}
    usual = run_ranks(train, 2, tmp_path / "usual", options)
    summed = run_ranks(train_where_the_mean_is_a_sum, 2, tmp_path / "summed", options)
    assert summed[0]["losses"] == pytest.approx(usual[0]["losses"], rel=1e-5)
    assert_close(summed[0], usual[0])


class Watching(Ending):
    """Compares the shards of this process before and after each refused step, bit for bit."""

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
        run_dir,
        rank,
        samples=Samples(bad=bad),
        kind=Watching,
        data={"shuffle": False},
        recovery={"heal": []},
        loop={"ema": 0.9},
    )
    result = trainer.fit()
    outcome = (result.steps, result.skipped, [incident.step for incident in result.incidents])
    guilty = [incident.rank for incident in result.incidents]
    return outcome, trainer.num_compared, guilty, whole_state(trainer)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_bad_batch_on_one_rank_is_refused_by_all(tmp_path, guilty):
    first, second = run_ranks(refuse, 2, tmp_path / "run", range(16 + 4 * guilty, 20 + 4 * guilty))
    assert first[0] == second[0] == (6, 1, [2])
    assert first[1] == second[1] == 1
    assert first[2] == second[2] == [guilty]
    assert_same_weights(first[3], second[3])


def ruin(rank, run_dir, owner):
    trainer = make_trainer(run_dir, rank, checkpoint={"snapshot_every": 2, "trust_after": 0}, kind=Ruined)
    trainer.owner = owner
    result = trainer.fit()
    assert all(bool(local(p).isfinite().all()) for p in trainer.model.parameters())
    return result.rollbacks, result.steps, [incident.step for incident in result.incidents], whole_state(trainer)


class Ruined(Ending):
    """One rank's shard of a weight becomes NaN once."""

    owner, done = 0, False

    def on_commit(self, view):
        if view.step == 2 and not self.done:
            self.done = True
            if self.machine.rank == self.owner:
                local(self.model.first.weight).fill_(float("nan"))


@pytest.mark.parametrize("owner", [0, 1])
def test_a_bad_shard_rolls_back_all_ranks(tmp_path, owner):
    first, second = run_ranks(ruin, 2, tmp_path / "run", owner)
    assert first[:3] == second[:3]
    assert first[0] == 1
    assert_same_weights(first[3], second[3])


class Noting(Ending):
    """Records the dtypes in which the modules compute."""

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


def test_islands_are_fsdp_units_of_their_own(tmp_path):
    options = {
        "loop": {"precision": "bf16", "shard_dtype": "bf16", "shard_blocks": ["Block"]},
        "guards": {"islands": {"modules": ["blocks.1", "last"]}},
    }
    (types, first), (_, second) = run_ranks(types_of, 2, tmp_path / "run", options)
    assert types["first"][1] == types["blocks.0.linear"][1] == torch.bfloat16
    assert types["blocks.1.norm"] == (torch.float32, torch.float32)
    assert types["last"][1] == torch.float32
    assert_same_weights(first, second)


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


def test_an_optimizer_that_already_stepped_is_an_error():
    outcomes = outcomes_of(used_optimizer, 2)
    assert [outcome.error for outcome in outcomes] == ["UsageError"] * 2
    assert "To fix" in outcomes[0].message


def test_a_plain_tensor_is_its_own_shard():
    tensor = torch.randn(3)
    assert not is_dtensor(tensor)
    assert local(tensor) is tensor
    assert full_tensor(tensor) is tensor


def step_with(rank, name, run_dir):
    config = {
        "loop": {"strategy": "fsdp", "device": "cpu", "max_steps": 2},
        "optimizer": {"_target_": f"torch.optim.{name}", "lr": 0.01},
        "logging": {"console": "off", "tensorboard": False},
    }
    trainer = SafeTrainer(Net(), loss_fn=loss_fn, train_data=Samples(), config=config, run_dir=run_dir)
    return trainer.fit().steps, trainer.optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize(("name", "fused"), [("SGD", None), ("AdamW", True)])
def test_the_optimizer_of_a_config_has_a_kernel_for_shards(tmp_path, name, fused):
    assert run_ranks(step_with, 2, name, str(tmp_path / "run"), timeout=60) == [(2, fused)] * 2


def take_sharded_otherwise(rank, run_dir):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo")
    flat = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    parallel = parallelize_module(torch.nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())
    messages = []
    for layer in (flat, parallel):
        model = torch.nn.Sequential(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError) as raised:
            SafeTrainer(model, loss_fn=loss_fn, optimizer=optimizer, train_data=[torch.ones(2, 4)], run_dir=run_dir)
        messages.append(str(raised.value))
    return messages


def test_other_ways_to_shard_are_errors_at_the_start(tmp_path):
    for flat, parallel in run_ranks(take_sharded_otherwise, 2, str(tmp_path / "run"), timeout=60):
        assert "0 is wrapped in FullyShardedDataParallel" in flat
        assert "fully_shard" in flat
        assert "tensor parallelism" in parallel
        assert "safetrain.watch" in parallel
