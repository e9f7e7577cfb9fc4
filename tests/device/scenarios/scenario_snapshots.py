"""Snapshots are copied to pinned memory while the next step runs, and hold the state of the moment they were taken."""

import copy
import math

import pytest
import torch
from backend import KNOBS, NAME
from small import assert_same, fused_adamw, make_batches, make_model

from safetrain import SafeTrainer
from safetrain.checkpoint.copies import Copy

CONFIG = {"checkpoint": {"snapshot_every": 3, "trust_after": 2, "snapshots": 4}}


def on_host(state):
    return {name: value.cpu().clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def remembering(request, on_device):
    """A trainer that keeps the weights and moments after each committed step, to compare the snapshots with."""
    KNOBS.late_copies = request.param

    def make(**loop):
        trainer = on_device(loop=loop, config=CONFIG, optimizer=fused_adamw, train_data=make_batches(20))
        after_step, found = trainer.run_step, {}

        def remembered(window):
            after_step(window)
            moments = [p for state in trainer.optimizer.state.values() for p in state.values()]
            found[trainer.run.result.steps] = on_host(trainer.model.state_dict()), [m.cpu().clone() for m in moments]

        trainer.run_step = remembered
        return trainer, found

    return make


@pytest.mark.parametrize("loop", [{}, {"ema": 0.9}, {"precision": "fp16"}], ids=str)
def test_a_snapshot_is_of_one_moment(remembering, loop):
    trainer, found = remembering(**loop)
    trainer.fit()
    ring = trainer._session.checkpoints.snapshots
    ring.order()
    assert len(ring) >= 3
    for snapshot in ring._ring:
        snapshot.memory.finish()
        weights, moments = found[snapshot.state.rest["num_committed"]]
        own = snapshot.state.part("model")
        assert_same(on_host(own), {name: weights[name] for name in own})
        assert_same([t.clone() for t in snapshot.state.part("optimizer").values()], moments)


def test_it_is_copied_while_the_next_step_runs(on_device):
    KNOBS.late_copies = True
    trainer = on_device(config=CONFIG, optimizer=fused_adamw, train_data=make_batches(10))
    run_step, before, after = trainer.run_step, [], []

    def looking(window):
        ring = trainer._session.checkpoints.snapshots
        before.append(bool(ring._ring) and ring._ring[-1].memory.is_here)
        run_step(window)
        after.append(ring._arriving is None)

    trainer.run_step = looking
    trainer.fit()
    assert before[3] is False  # the step after the one with a snapshot begins with the copy on its way
    assert all(after)


def test_a_copy_of_a_state_that_was_written_meanwhile_is_dropped(on_device, device):
    KNOBS.late_copies = True

    class Writing(SafeTrainer):
        def run_step(self, window):
            if self.run.result.steps == 3:
                with torch.no_grad():
                    self.model[0].weight.mul_(1.0)
            super().run_step(window)

    trainer = on_device(cls=Writing, config=CONFIG, optimizer=fused_adamw, train_data=make_batches(8))
    trainer.fit()
    assert [s.step for s in trainer._session.checkpoints.snapshots._ring] == [6]


def test_going_back_to_one(on_device):
    KNOBS.late_copies = True
    data = make_batches(20)
    states = {}

    class Spoilt(SafeTrainer):
        def on_commit(self, view):
            states[self.run.result.steps] = copy.deepcopy(on_host(self.model.state_dict()))
            if view.step == 10:
                with torch.no_grad():
                    self.model[0].weight.data.fill_(math.nan)

    trainer = on_device(make_model(dropout=0.0), Spoilt, config=CONFIG, optimizer=fused_adamw, train_data=data)
    result = trainer.fit()
    assert result.rollbacks == 1
    assert all(t.isfinite().all() for t in on_host(trainer.model.state_dict()).values())


def test_frozen_weights_are_copied_once(on_device):
    model = make_model()
    model[0].requires_grad_(False)
    trainer = on_device(
        model,
        config=CONFIG,
        optimizer=lambda p: fused_adamw([q for q in p if q.requires_grad]),
        train_data=make_batches(20),
    )
    trainer.fit()
    ring = trainer._session.checkpoints.snapshots
    assert len({s.state.tensors["model/0.weight"].data_ptr() for s in (ring.first, *ring._ring)}) == 1
    assert len({s.state.tensors["model/4.weight"].data_ptr() for s in (ring.first, *ring._ring)}) > 1


def test_memory_that_cannot_be_pinned_is_ordinary_memory(on_device):
    KNOBS.pins = False
    trainer = on_device(config=CONFIG, optimizer=fused_adamw, train_data=make_batches(10))
    assert trainer.fit().snapshots["num_taken"] == 4
    assert not any(b.is_pinned() for s in trainer._session.checkpoints.snapshots._ring for b in s.memory._blocks)


def test_the_memory_of_a_copy_is_flat_and_used_again(device):
    from safetrain.checkpoint.state import TrainState

    tensors = {f"model/{i}": torch.full((100,), float(i), device=NAME) for i in range(20)}
    memory = Copy()
    first = memory.take(TrainState(tensors, {}))
    assert len(memory._blocks) == 1
    assert memory._blocks[0].is_pinned()
    second = memory.take(TrainState(tensors, {}))
    assert [t.data_ptr() for t in first.tensors.values()] == [t.data_ptr() for t in second.tensors.values()]
    assert [t[0].item() for t in second.tensors.values()] == list(range(20))
