"""Runs of a small model in several processes, replicated or sharded, that may end in the middle; and their whole state."""

import contextlib

import torch
from checkpoint_cases import Counting, Gone
from torch import nn
from torch.nn import functional as F

from safetrain import SafeTrainer
from safetrain.tensors.sharded import full_tensor, is_sharded


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, inputs):
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Net(nn.Module):
    """Parameters whose first dimension is odd, or smaller than the number of processes; buffers; dropout."""

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


class Samples(Counting):
    """Each sample knows its index."""

    def __init__(self, length=56, bad=()):
        super().__init__(length, bad)

    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


class Ending(SafeTrainer):
    """Records which samples each step was trained on, and may end in the middle."""

    ends_after = None
    seen = ()

    def on_commit(self, view):
        self.seen = [*self.seen, [index for batch in view.window() for index in batch[2].tolist()]]
        if self.run.result.steps == self.ends_after:
            raise Gone


def loss_fn(model, batch):
    inputs, targets, _ = batch
    return F.mse_loss(model(inputs).float(), targets)


def make_trainer(run_dir, rank=0, strategy="fsdp", samples=None, ends_after=None, kind=Ending, **sections):
    torch.manual_seed(4 + rank)  # only the model of rank 0 counts
    model = Net()
    torch.manual_seed(200 + rank)  # dropout masks differ between processes
    config = {
        "name": "ranks",
        "seed": 3,
        "data": {"batch_size": 4, **sections.pop("data", {})},
        "loop": {"max_epochs": 1, "device": "cpu", "strategy": strategy, **sections.pop("loop", {})},
        "checkpoint": {"every_steps": 2, **sections.pop("checkpoint", {})},
        "guards": {"clip": {"max_norm": 0.5}, **sections.pop("guards", {})},
        "logging": {"console": "off", "tensorboard": False},
        **sections,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = Samples() if samples is None else samples
    trainer = kind(model, loss_fn=loss_fn, optimizer=optimizer, train_data=samples, config=config, run_dir=run_dir)
    trainer.ends_after = ends_after
    return trainer


def whole_state(trainer):
    """Equal on all processes, except for random state and, with fsdp, buffers."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return {
        "model": {name: full_tensor(value.detach()).clone() for name, value in trainer.model.named_parameters()},
        "moments": [full_tensor(value).clone() for value in moments],
        "buffers": {name: value.clone() for name, value in trainer.model.named_buffers()},
        "average": {} if trainer.ema is None else {n: full_tensor(v).clone() for n, v in trainer.ema.weights.items()},
        "random": torch.get_rng_state(),
        "losses": list(trainer.run.result.losses or trainer.run.losses),
        "seen": trainer.seen,
    }


def train(rank, run_dir, options, resume=False):
    trainer = make_trainer(run_dir, rank, **options)
    is_parallel = torch.distributed.is_initialized()
    assert is_sharded(trainer.model) == (is_parallel and trainer.config.loop.strategy == "fsdp")
    with contextlib.suppress(Gone):
        trainer.fit(resume=resume)
    return whole_state(trainer)


def assert_same_state(left, right, parts=("model", "buffers", "average")):
    for part in parts:
        assert left[part].keys() == right[part].keys()
        assert all(torch.equal(left[part][name], right[part][name]) for name in left[part]), part
    assert all(torch.equal(a, b) for a, b in zip(left["moments"], right["moments"], strict=True))
    assert left["losses"] == right["losses"]
