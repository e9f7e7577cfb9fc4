"""Healthy trainings that look odd: nothing is refused, nothing is undone, and the weights are bit for bit those of a plain loop."""

import pytest
import torch
from awkward import TASKS, make, train_plainly

from safetrain import SafeTrainer

SHORT = ["sparse_rewards", "task_switch", "wgan", "tiny_batches", "kl_annealing"]
OFF = {"logging": {"console": "off", "tensorboard": False}, "checkpoint": {"enabled": False, "save_final": False}}


def check(name, steps, seed, run_dir):
    plain = make(name, steps, seed)
    torch.manual_seed(7)
    losses = train_plainly(plain)
    task = make(name, steps, seed)
    parts = {"loss_fn": task.loss, "optimizer": task.optimizer, "scheduler": task.scheduler, "train_data": task.batches}
    trainer = SafeTrainer(task.model, config=OFF, run_dir=run_dir, **parts)
    torch.manual_seed(7)
    result = trainer.fit()
    assert [(i.step, i.decision.reasons) for i in result.incidents] == []
    assert (result.skipped, result.rollbacks, result.steps) == (0, 0, steps)
    if result.num_clipped == 0:
        pairs = zip(plain.model.state_dict().items(), task.model.state_dict().values(), strict=True)
        assert [key for (key, a), b in pairs if not torch.equal(a, b)] == []
    else:
        assert result.num_clipped <= max(0.01 * steps, 3)
        end = sum(losses[-50:]) / 50
        assert sum(result.losses[-50:]) / 50 <= end + 0.1 * abs(end)
    return trainer


@pytest.mark.parametrize("name", SHORT)
def test_an_awkward_training_is_left_alone(name, tmp_path):
    check(name, 300, 0, tmp_path / "run")


DISTURBED = {("dead_value_network", 0), ("q_learning", 2), ("warm_restarts", 0), ("warm_restarts", 2), ("hinge", 2)}
"""Known harm: a few updates that raise the loss of good batches for a moment are refused, or undone, although plain training gets over
it. How a trial could tell that from damage is not known yet."""


def cases():
    for name in TASKS:
        for seed in range(3):
            known = pytest.mark.xfail(reason="harmless steps are refused", strict=False)
            yield pytest.param(name, seed, marks=[known] if (name, seed) in DISTURBED else [])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), tuple(cases()))
def test_every_awkward_training_is_left_alone(name, seed, tmp_path):
    check(name, 2000, seed, tmp_path / "run")


def test_suspects_were_tried_there(tmp_path):
    """Otherwise the tests above would show nothing about trials."""
    trainer = check("task_switch", 300, 1, tmp_path / "run")
    assert trainer.guard("spike").num_harmless > 0
