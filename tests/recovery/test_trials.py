"""Trials leave no trace, and a learning rate that is too high from the start is found by one."""

import pytest
import torch
from small import make_batches
from torch import nn

from safetrain import Action, Guard, SafeTrainer, Verdict
from safetrain.core.verdict import Doubt
from safetrain.guards.excursion import Excursion


class Doubter(Guard):
    """Suspects the state in one step, and the update in another."""

    def judge(self, view):
        doubts = {14: (Action.ROLLBACK, Doubt.BRANCHES), 17: (Action.SKIP, Doubt.TRIAL)}
        if view.step not in doubts:
            return Verdict()
        action, doubt = doubts[view.step]
        return Verdict(action, reason="suspect", doubt=doubt)


def penalised(model, batch):
    """Needs the gradient of its own output, and draws random numbers."""
    x = (batch[0] + 0.1 * torch.randn_like(batch[0])).requires_grad_(True)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - batch[1]).square().mean() + (slope.norm(dim=1) - 1.0).square().mean()


def test_trials_of_a_loss_with_a_gradient_penalty_leave_no_trace(make_trainer):
    ends = []
    for guards in ([], [Doubter()]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        config = {"checkpoint": {"snapshot_every": 5, "trust_after": 2}}
        batches = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 4)]
        parts = {"model": model, "loss_fn": penalised, "optimizer": optimizer, "train_data": batches}
        assert make_trainer(**parts, config=config, guards=guards).fit().healthy
        ends.append(model.state_dict())
    assert [key for key, value in ends[0].items() if not torch.equal(value, ends[1][key])] == []


@pytest.mark.parametrize(("factor", "restarts"), [(100.0, 1), (1.0, 0)])
def test_a_rate_that_is_far_too_high_is_lowered_to_one_that_was_tried(tmp_path, factor, restarts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 * factor)
    batches = [(x, torch.sin(x.sum(1, keepdim=True) / 2)) for x in torch.randn(120, 32, 8)]
    config = {"logging": {"console": "off", "tensorboard": False}}
    parts = {"loss_fn": nn.MSELoss(), "optimizer": optimizer, "train_data": batches}
    result = SafeTrainer(model, **parts, config=config, run_dir=tmp_path / "run").fit()
    assert result.rollbacks == restarts
    assert sum(result.losses[-20:]) / 20 < 0.2
    if restarts:
        assert "of the learning rate ends at a loss of" in " ".join(result.incidents[0].decision.reasons)


def excursion(losses):
    found = Excursion()
    found.begin(100, level=0.001, first=0.05)
    for loss in losses:
        found.learn(loss)
    return found


def test_other_data_contradict_what_was_learned_and_a_rare_reward_does_not():
    assert excursion([9.0, 8.0, 8.5, 8.0]).contradicts
    assert not excursion([130.0, 0.6, 0.5, 0.4]).contradicts


def test_a_comparison_that_diverges_does_not_spoil_the_next_one(make_trainer):
    """Gradients of the step that overflowed are not added to those of the branch after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.9)
    trainer = make_trainer(model=model, optimizer=optimizer, train_data=make_batches(30))
    result = trainer.fit()
    assert result.rollbacks >= 1
    assert "going back at" in " ".join(reason for i in result.incidents for reason in i.decision.reasons)
