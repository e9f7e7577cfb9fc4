"""Bits that flip in weights, moments and gradients are found and named; nothing is found where none did."""

import pytest
import torch
from process_group import run_ranks
from torch import nn

from safetrain import SafeTrainer

QUIET = {"logging": {"console": "off", "tensorboard": False}}


def batches(steps=60):
    generator = torch.Generator().manual_seed(0)
    return [(x, x.sum(1, keepdim=True)) for x in torch.randn(steps, 16, 4, generator=generator)]


def flip(tensor, bit=18):
    with torch.no_grad():
        tensor.data.view(torch.int32).view(-1)[3] ^= 1 << bit


class Flipping(SafeTrainer):
    """After step 20: a bit of a weight or of a moment; or in the gradient of step 23, only the first time that it is computed."""

    what = "none"
    rank = 0

    def on_commit(self, view):
        if view.step == 20 and self.machine.rank == self.rank:
            weight = self.model[2].weight
            if self.what == "weight":
                flip(weight)
            elif self.what == "moment":
                flip(self.optimizer.state[weight]["exp_avg"])

    def training_step(self, model, batch):
        loss = (model(batch[0]) - batch[1]).square().mean()
        if self.what == "gradient" and self.step == 23 and not self.run.result.warnings and not hasattr(self, "_done"):
            self._done = True
            flip(batch[0], 20)
            loss = (model(batch[0]) - batch[1]).square().mean()
            flip(batch[0], 20)
        return loss


def fit(run_dir, what="none", **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sections = {"guards": {"sdc": {"replay_every": 4}}, "checkpoint": {"snapshot_every": 5, "trust_after": 2}, **config}
    trainer = Flipping(model, optimizer=optimizer, train_data=batches(), config={**QUIET, **sections}, run_dir=run_dir)
    trainer.what, trainer.rank = what, trainer.machine.world_size - 1
    return trainer.fit(), list(model.state_dict().values())


@pytest.mark.parametrize(("what", "name"), [("weight", "2.weight"), ("moment", "exp_avg of 2.weight")])
def test_a_flipped_bit_of_the_state_is_named_in_the_next_step_and_undone(what, name, tmp_path):
    result, _ = fit(tmp_path / "run", what)
    (incident,) = result.incidents
    assert (incident.step, incident.trigger.guard, incident.cause.label) == (21, "sdc", "memory_corruption")
    assert name in incident.cause.explanation
    assert incident.decision.action == "rollback"


def test_a_step_that_was_computed_wrong_once_is_not_applied(tmp_path):
    result, _ = fit(tmp_path / "run", "gradient")
    (incident,) = result.incidents
    assert (incident.step, incident.cause.label, incident.decision.action) == (23, "memory_corruption", "skip")
    assert "0.weight" in incident.cause.explanation


def test_a_run_without_faults_is_not_changed(tmp_path):
    with_guard, weights = fit(tmp_path / "one")
    without, plain = fit(tmp_path / "two", guards={})
    assert (with_guard.incidents, with_guard.steps) == ([], without.steps)
    assert all(map(torch.equal, weights, plain))


def train(rank, run_dir, what):
    result, weights = fit(run_dir, what, loop={"device": "cpu"})
    about = [(i.step, i.rank, i.cause.label, i.cause.explanation, i.decision.action) for i in result.incidents]
    return about, [w.tolist() for w in weights]


def test_with_several_processes_the_rank_is_named_and_takes_over_the_state_of_another(tmp_path):
    healthy, same = run_ranks(train, 2, str(tmp_path / "healthy"), "none", timeout=90)
    assert (healthy, healthy[0]) == (same, [])
    first, second = run_ranks(train, 2, str(tmp_path / "run"), "weight", timeout=90)
    assert first == second
    ((step, rank, label, explanation, action),) = first[0]
    assert (step, rank, label, action) == (21, 1, "memory_corruption", "commit")
    assert "2.weight on rank 1" in explanation
    assert first[1] == healthy[1], "as if it had never happened"
