"""Networks that no longer learn although every number is finite, and a suspicious loss early in a run."""

from functools import partial

import pytest
import torch
from small import assert_same, deep_state, make_batches
from torch import nn

from safetrain import SafeTrainer


def sums(count):
    """The same batch again and again: easy to learn."""
    x = torch.randn(64, 6)
    return [(x, x.sum(1, keepdim=True))] * count


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
            self.model.collapsed = 60 <= view.step < 78

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
        assert make_trainer(nn.Linear(6, 1), train_data=make_batches(30, size=size), config=config).fit().healthy


def test_the_output_hook_is_on_the_model_only_on_due_steps(make_trainer):
    seen = {}

    class Looking(SafeTrainer):
        def training_step(self, model, batch):
            seen[self.step] = len(model._forward_hooks)
            return super().training_step(model, batch)

    model = nn.Linear(6, 1)
    config = {"guards": {"stall": {"outputs_every": 5}, "sanity": None}}
    make_trainer(model, Looking, train_data=make_batches(12), config=config).fit()
    assert [step for step, num_hooks in seen.items() if num_hooks] == [4, 9]
    assert not model._forward_hooks


def test_a_small_network_recovers_from_a_learning_rate_of_1(make_trainer):
    """Unguarded, SGD throws it to losses beyond 1e20 within a few steps."""
    batches = sums(400)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    parts = {"optimizer": partial(torch.optim.SGD, lr=1.0), "config": {"loop": {"max_steps": 300}}}
    result = make_trainer(model, train_data=batches, **parts).fit()
    assert result.incidents
    assert max(result.losses) > 10 * result.losses[0]
    assert result.final_loss < 0.01 * result.losses[0]


# ---- a hard batch passes, a learning rate that is too high does not -----------------------------------------------


def test_a_hard_batch_passes_and_changes_no_weight(make_trainer):
    batches, states = make_batches(15), []
    batches[3][1].mul_(200.0)
    for guards in ({"clip": None}, None):
        torch.manual_seed(1)
        optimizer = partial(torch.optim.SGD, lr=1e-3)
        trainer = make_trainer(optimizer=optimizer, train_data=batches, config={"guards": guards})
        torch.manual_seed(2)
        result = trainer.fit()
        assert result.healthy
        assert result.losses[3] > 1000 * max(result.losses[:3])
        states.append(deep_state(trainer))
    assert_same(*states)


def test_a_learning_rate_that_worsens_known_batches_is_reduced_at_once(make_trainer):
    parts = {"train_data": sums(60), "config": {"loop": {"max_steps": 50}}}
    result = make_trainer(nn.Linear(6, 1), optimizer=partial(torch.optim.SGD, lr=50.0), **parts).fit()
    assert result.incidents[0].step <= 4
    assert any(reason.startswith("restart:") for reason in result.incidents[0].decision.reasons)
    assert result.final_loss < 0.1 * result.losses[0]
