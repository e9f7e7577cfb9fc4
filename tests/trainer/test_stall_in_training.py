"""Networks that no longer learn although every number is finite."""

import pytest
import torch
from small import make_batches, mse
from torch import nn

from safetrain import SafeTrainer


class Collapsing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 1)
        self.collapsed = False

    def forward(self, x):
        return self.fc(torch.zeros_like(x) if self.collapsed else x)


@pytest.mark.parametrize("compile_with", [False, "aot_eager"])
def test_the_same_output_for_every_sample_is_rolled_back(make_trainer, compile_with):
    class Breaking(SafeTrainer):
        def on_commit(self, view):
            self.model.collapsed = 60 <= view.step < 130

    config = {"guards": {"stall": {"outputs_every": 5}, "rollback": None, "spike": None}}
    config["checkpoint"] = {"snapshot_every": 20, "trust_after": 5}
    config["loop"] = {"compile": compile_with}
    result = make_trainer(Collapsing(), Breaking, train_data=make_batches(200), config=config).fit()
    first = result.incidents[0]
    assert (first.trigger.guard, first.trigger.signal, first.decision.action) == ("stall", "output_spread", "rollback")
    assert 60 < first.step < 90
    assert result.status == "done"


def test_differing_outputs_and_batches_of_one_are_healthy(make_trainer):
    for size in (1, 8):
        config = {"guards": {"stall": {"outputs_every": 1}}}
        model = nn.Linear(6, 1)
        assert make_trainer(model, loss_fn=mse, train_data=make_batches(30, size=size), config=config).fit().healthy


def test_the_output_hook_is_on_the_model_only_on_due_steps(make_trainer):
    seen = {}

    class Looking(SafeTrainer):
        def training_step(self, model, batch):
            seen[self.step] = len(model._forward_hooks)
            return super().training_step(model, batch)

    model = nn.Linear(6, 1)
    config = {"guards": {"stall": {"outputs_every": 5}}}
    make_trainer(model, Looking, loss_fn=mse, train_data=make_batches(12), config=config).fit()
    assert [step for step, num_hooks in seen.items() if num_hooks] == [4, 9]
    assert not model._forward_hooks


def test_a_small_network_recovers_from_a_learning_rate_of_1(make_trainer):
    """Unguarded, SGD throws it to losses beyond 1e20 within a few steps."""
    x = torch.randn(64, 6)
    batches = [(x, x.sum(1, keepdim=True))] * 400
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model, optimizer=optimizer, train_data=batches, config={"loop": {"max_steps": 300}})
    result = trainer.fit()
    assert result.incidents
    assert max(result.losses) > 10 * result.losses[0]
    assert result.final_loss < 0.01 * result.losses[0]
