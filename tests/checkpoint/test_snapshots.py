"""Snapshots in memory, and rolling back to them."""

import math

import pytest
import torch
from records import journal
from small import assert_same, deep_state, make_batches, make_model

from safetrain import CheckpointError, SafeTrainer, UsageError
from safetrain.checkpoint import copies
from safetrain.checkpoint.snapshots import SnapshotRing
from safetrain.checkpoint.state import TrainState
from safetrain.tensors.rng import RandomState


def state(value=1.0, moment=0.5, bias=0.0):
    tensors = {
        "model/w": torch.full((4,), value),
        "model/b": torch.full((2,), bias),
        "optimizer/0/exp_avg_sq": torch.full((4,), moment),
    }
    return TrainState(tensors, {"born_bad": [], "buffers": [], "num_committed": 0})


def test_a_snapshot_is_a_copy_whose_memory_is_reused():
    ring = SnapshotRing(size=2, trust_after=0)
    live = state()
    for step in range(6):
        live.tensors["model/w"].fill_(step)
        assert not ring.take(step, live).problems
    assert (len(ring), ring.num_taken) == (2, 6)
    assert 3 * live.num_bytes <= ring.num_bytes <= 3 * (live.num_bytes + 64 * len(live.tensors))
    assert ring.first.state.tensors["model/w"].tolist() == [0.0] * 4
    pointers = {s.state.tensors["model/w"].data_ptr() for s in ring._ring}
    ring.take(6, live)
    assert pointers == {s.state.tensors["model/w"].data_ptr() for s in ring._ring}


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (state(math.nan), "model/w"),
        (state(math.inf), "model/w"),
        (state(-1e30), "model/w"),
        (state(1001.0), "model/w"),
        (state(moment=-1e-9), "optimizer/0/exp_avg_sq"),
        (state(moment=1e30), "optimizer/0/exp_avg_sq"),
        (state(bias=11.0), "model/b"),
    ],
)
def test_the_audit_refuses_a_bad_state(bad, what):
    ring = SnapshotRing(3, 0)
    ring.take(0, state())
    assert list(ring.take(1, bad).problems) == [what]
    assert len(ring) == 0
    assert not ring.take(2, state(999.0, moment=400.0, bias=9.0)).problems


def test_a_large_state_is_of_one_moment_although_it_is_copied_later(monkeypatch):
    monkeypatch.setattr(copies, "LARGE", 1)
    ring = SnapshotRing(size=2, trust_after=0)
    live = state()
    ring.take(0, live)  # the first one is copied at once
    for step in (1, 2):
        ring.order()  # comes before an update
        live.tensors["model/w"].fill_(step)
        ring.take(step, live)
    ring.order()  # comes before an update
    live.tensors["model/w"].fill_(3.0)
    assert [s.state.tensors["model/w"].tolist() for s in ring.all()] == [[1.0] * 4, [1.0] * 4, [2.0] * 4]


def test_a_snapshot_that_was_written_to_before_it_was_copied_is_not_kept(monkeypatch):
    monkeypatch.setattr(copies, "LARGE", 1)
    begun = []

    class Late(copies._HostTransfer):
        def _copy(self):
            begun.append(super()._copy)

    monkeypatch.setattr(copies, "_HostTransfer", Late)
    ring, live = SnapshotRing(size=2, trust_after=0), state()
    ring.take(0, live)
    ring.take(1, live)
    live.tensors["model/w"].fill_(3.0)
    begun[0]()
    ring.order()
    assert [s.step for s in ring.all()] == [0]


def test_trust_is_earned_by_healthy_steps_in_a_row():
    ring = SnapshotRing(3, trust_after=3)
    ring.take(0, state())
    ring.committed(2)
    ring.take(2, state())
    ring.committed(1)
    assert (ring.first.trusted, ring._ring[0].trusted) == (True, False)
    ring.refused()
    ring.committed(2)
    assert not ring._ring[0].trusted
    ring.committed(1)
    assert ring._ring[0].trusted


def test_lasting_growth_is_accepted_up_to_a_limit():
    ring = SnapshotRing(3, trust_after=1)
    ring.take(0, state())
    grown = state(5e4)
    audit = ring.take(1, grown)
    assert audit.problems
    assert not audit.is_fatal
    assert not ring.take(2, grown, allow_growth=True).problems
    assert ring.take(3, state(1e30), allow_growth=True).is_fatal


def test_the_only_trusted_snapshot_is_not_overwritten():
    ring = SnapshotRing(2, trust_after=2)
    ring.take(0, state())
    ring.take(1, state())
    ring.committed(2)
    for step in (4, 5, 6):
        ring.refused()
        ring.take(step, state())
    assert [(s.step, s.trusted) for s in ring._ring] == [(1, True), (6, False)]


def test_repeated_rollbacks_pick_older_snapshots_and_restart_the_first():
    ring = SnapshotRing(3, trust_after=1)
    for step in range(4):
        ring.take(step, state())
        ring.committed()
    ring.take(4, state())  # not trusted yet
    assert [ring.pick().step for _ in range(4)] == [3, 2, 0, 0]
    ring.take(9, state())
    ring.committed()
    assert ring.pick(restart=True).step == 0
    assert SnapshotRing(1, 0).pick() is None


@pytest.fixture
def train(make_trainer):
    def make(cls, data, **config):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return make_trainer(model, cls, optimizer=optimizer, scheduler=schedule, train_data=data, config=config)

    return make


@pytest.mark.parametrize(("precision", "large"), [("fp32", copies.LARGE), ("fp16", copies.LARGE), ("fp32", 1)])
def test_a_rollback_restores_everything_but_the_data_cursor_and_the_budgets(train, precision, large, monkeypatch):
    monkeypatch.setattr(copies, "LARGE", large)  # 1: all of it is copied while the next step is computed

    class Rolling(SafeTrainer):
        def on_commit(self, view):
            if self.run.result.steps == 14 and self.run.result.rollbacks == 0:
                refusals, consumed = self.run.num_refusals, self.stream.num_consumed
                step = self.rollback(skip_windows=2)
                snapshot = next(s for s in self._session.checkpoints.snapshots._ring if s.step == step)
                assert snapshot.trusted
                assert self.run.result.steps == self.scheduler.last_epoch == 10
                assert_same(deep_state(self), self.at_ten)
                assert_same(TrainState.gather(self.stepper).rest["guards"], snapshot.state.rest["guards"])
                assert torch.equal(RandomState.capture().torch_cpu, snapshot.state.rest["random"]["torch_cpu"])
                assert (self.run.num_refusals, self.stream.num_consumed) == (refusals, consumed + 2)
                assert len(self.run.result.incidents) == 1

        def run_step(self, window):
            super().run_step(window)
            if self.run.result.steps == 10 and not hasattr(self, "at_ten"):
                self.at_ten = deep_state(self)

    config = {
        "loop": {"precision": precision, "ema": 0.9, "max_steps": 20},
        "checkpoint": {"snapshot_every": 5, "trust_after": 3},
    }
    trainer = train(Rolling, make_batches(60, bad=(4,)), **config)
    result = trainer.fit()
    assert (result.rollbacks, result.steps) == (1, 20)
    assert result.attempted == result.skipped + 24
    assert [line["committed"] for line in journal(result) if line["event"] == "rollback"] == [10]


@pytest.mark.parametrize(("to", "steps"), [("first", 0), ("disk", 8)])
def test_rollback_to_the_first_state_or_to_disk(train, to, steps):
    class Rolling(SafeTrainer):
        def on_commit(self, view):
            if view.step == 10:
                self.rollback(to)
                assert self.run.result.steps == self.scheduler.last_epoch == steps

    result = train(Rolling, make_batches(40), loop={"max_steps": 15}, checkpoint={"every_steps": 4}).fit()
    assert (result.steps, result.attempted) == (15, 15 + 11 - steps)


def test_a_rollback_without_snapshots_is_an_error(train):
    class Rolling(SafeTrainer):
        def on_commit(self, view):
            with pytest.raises(CheckpointError, match="no state to go back to"):
                self.rollback()
            with pytest.raises(UsageError, match="not to 'there'"):
                self.rollback("there")

    assert train(Rolling, make_batches(2), checkpoint={"snapshot_every": None}).fit().steps == 2


def test_a_suspicious_state_is_not_taken_as_a_snapshot_and_logged(train, caplog):
    class Flipping(SafeTrainer):
        def on_commit(self, view):
            if view.step == 6:
                with torch.no_grad():
                    self.model[0].weight[0, 0] = 5e3
            if view.step == 9:
                assert list(self._session.checkpoints.rejected) == ["model/0.weight"]
                self.rollback()
                assert self.model[0].weight.abs().max() < 10

    config = {"checkpoint": {"snapshot_every": 2, "trust_after": 1}, "guards": {"clip": None}}
    result = train(Flipping, make_batches(16), **config).fit()
    assert result.rollbacks == 1
    assert "no snapshot was taken" in caplog.text


def test_snapshots_do_not_change_the_weights(train):
    weights = []
    for every in (None, 1, 7):
        torch.manual_seed(3)
        trainer = train(SafeTrainer, make_batches(20), checkpoint={"snapshot_every": every, "every_steps": every})
        trainer.fit()
        weights.append(trainer.model.state_dict())
    assert_same(weights[0], weights[1])
    assert_same(weights[0], weights[2])
