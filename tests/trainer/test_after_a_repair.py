"""What a repaired, accepted or undone step leaves behind for the steps after it."""

import math

import pytest
import torch
from small import make_batches

from safetrain import Action, Guard, SafeTrainer, Verdict


class RefuseOnce(Guard):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def judge(self, view):
        evidence = {"signal": "x", "value": 1.0}
        return Verdict(Action.SKIP, reason="not this one", evidence=evidence) if view.step == self.step else Verdict()


KEPT = {"checkpoint": {"snapshot_every": 5, "trust_after": 2}}


def test_the_last_good_batch_is_the_one_that_was_trained_on(make_trainer):
    batches = make_batches(40)
    batches[30][0][2, 0] = math.nan
    result = make_trainer(train_data=batches, guards=[RefuseOnce(31)], config=KEPT).fit()
    assert [i.decision.action for i in result.incidents] == ["commit", "skip"]
    assert (result.steps, result.skipped, result.rollbacks) == (39, 1, 0)


def test_an_overflow_in_a_hard_batch_is_recorded(make_trainer):
    data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
    data[7] = (data[7][0] * 200, data[7][1] * 200)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {"loop": {"precision": "fp16"}}
    result = make_trainer(model, optimizer=optimizer, train_data=data, config=config).fit()
    assert result.overflows > 0
    assert len(result.losses) == result.steps + result.skipped == 20


class Spoiling(SafeTrainer):
    """Writes Inf into a parameter that is not trained, after a number of commits."""

    at = 18
    done = False

    def on_commit(self, view):
        if self.run.result.steps == self.at and not self.done:
            self.done = True
            with torch.no_grad():
                self.model.frozen.fill_(math.inf)


class WithFrozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 1)
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, inputs):
        return self.linear(inputs)


def test_an_evaluation_that_a_rollback_undid_is_made_again(make_trainer):
    config = {"loop": {"eval_every": 10, "max_steps": 19}, "checkpoint": {"snapshot_every": 9, "trust_after": 5}}
    data = make_batches(40)
    result = make_trainer(WithFrozen(), Spoiling, train_data=data, eval_data=data[:2], config=config).fit()
    assert result.rollbacks == 1
    assert len(result.evaluations) == 3


def test_a_bad_state_found_while_steps_are_deferred_undoes_them_all(make_trainer):
    model = WithFrozen()
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.05, fused=True)
    config = {
        "loop": {"host_read_every": 6, "max_steps": 40},
        "guards": {"finite": {"state_every": 1000}},
        "checkpoint": {"snapshot_every": 15, "trust_after": 2, "every_steps": 20, "async": True},
    }
    data = make_batches(60)
    result = make_trainer(model, Spoiling, optimizer=optimizer, train_data=data, config=config).fit()
    assert result.rollbacks == 1
    assert result.steps == 40
    assert len(result.losses) == result.steps + result.skipped + result.steps_undone


def test_a_hook_set_on_the_instance_is_called(make_trainer):
    called = []
    trainer = make_trainer(train_data=make_batches(4), eval_data=make_batches(2))
    trainer.evaluation_step = lambda model, batch: called.append(1) or {"loss": torch.tensor(7.0)}
    assert trainer.fit().evaluations[-1]["loss"] == 7.0
    assert called


def test_an_error_in_a_look_at_the_state_is_the_users(make_trainer):
    class OutOfMemory(SafeTrainer):
        def training_step(self, model, batch):
            if not torch.is_grad_enabled():
                raise torch.OutOfMemoryError("simulated")
            return super().training_step(model, batch)

    trainer = make_trainer(cls=OutOfMemory, train_data=make_batches(40), guards=[RefuseOnce(21)], config=KEPT)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        trainer.fit()
