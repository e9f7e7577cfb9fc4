"""Weights that are not trained are copied to memory once, and written to disk once, as long as their bits stay the same."""

import os

import pytest
import torch
from small import assert_same
from torch import nn

from safetrain import SafeTrainer
from safetrain.checkpoint import store


class Adapted(nn.Module):
    """A large layer that is not trained, and a small one that is."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(6, 400), nn.Linear(400, 1)
        self.large.requires_grad_(False)

    def forward(self, x):
        return self.small(self.large(x))


@pytest.fixture
def train(make_trainer, monkeypatch):
    monkeypatch.setattr(store, "SHARED_FROM", 1000)

    def make(cls=SafeTrainer, steps=12, **parts):
        torch.manual_seed(0)
        model = Adapted()
        data = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(20)]
        optimizer = torch.optim.AdamW(model.small.parameters(), lr=1e-2)
        config = {
            "loop": {"max_steps": steps},
            "checkpoint": {"every_steps": 4, "snapshot_every": 4, "keep_last": 9, "trust_after": 1},
        }
        return make_trainer(model, cls, optimizer=optimizer, train_data=data, config=config, **parts)

    return make


def files(trainer, name=store.FROZEN):
    return [path / name for path in sorted((trainer.run.dir / "checkpoints").glob("step-*")) if not path.is_symlink()]


def test_one_file_and_one_copy_in_memory(train):
    trainer = train()
    trainer.fit()
    written = files(trainer)
    assert len(written) == 4
    assert len({os.stat(path).st_ino for path in written}) == 1
    snapshots = trainer._session.checkpoints.snapshots
    places = {s.state.tensors["model/large.weight"].data_ptr() for s in (snapshots.first, *snapshots._ring)}
    assert len(places) == 1
    assert (
        snapshots.num_bytes
        < 2 * sum(p.nbytes for p in trainer.model.parameters()) + 8 * trainer.model.small.weight.nbytes * 3
    )


def test_a_resume_has_them_and_a_rollback_too(train):
    whole = train()
    whole.fit()
    part = train(steps=8)
    part.fit()
    rest = train(run_dir=part.run.dir)
    with torch.no_grad():
        rest.model.large.weight.zero_()  # the checkpoint has it
    rest.fit(resume="force")
    assert_same(whole.model.state_dict(), rest.model.state_dict())


def test_snapshots_and_what_a_resume_writes_link_to_the_same_file(train):
    part = train(steps=10)
    part.fit()
    rest = train(run_dir=part.run.dir, steps=18)
    rest.fit(resume="force")
    found = list(part.run.dir.rglob(store.FROZEN))
    assert {path.parent.parent.name for path in found} == {"checkpoints", "snapshots"}
    assert len({os.stat(path).st_ino for path in found}) == 1
    snapshots = rest._session.checkpoints.snapshots
    assert len({s.state.tensors["model/large.weight"].data_ptr() for s in snapshots.all()}) == 1


def test_when_they_change_after_all_they_are_copied_and_written_anew(train):
    class Thawed(SafeTrainer):
        def on_commit(self, view):
            if view.step == 5:
                self.model.large.weight.data[0, 0] = 5.0  # does not count as a write for autograd

    trainer = train(Thawed)
    trainer.fit()
    assert len({os.stat(path).st_ino for path in files(trainer)}) == 2
    snapshots = trainer._session.checkpoints.snapshots
    values = [s.state.tensors["model/large.weight"][0, 0].item() for s in (snapshots.first, *snapshots._ring)]
    assert values[-1] == 5.0
    assert values[0] != 5.0


def test_small_ones_are_in_each_checkpoint(train, monkeypatch):
    monkeypatch.setattr(store, "SHARED_FROM", 2**24)
    trainer = train()
    trainer.fit()
    assert not any(path.exists() for path in files(trainer))


def test_without_links_they_are_written_each_time(train, monkeypatch):
    def no_links(*_):
        raise OSError("not on this file system")

    monkeypatch.setattr(os, "link", no_links)
    trainer = train()
    trainer.fit()
    assert len({os.stat(path).st_ino for path in files(trainer)}) == 4
