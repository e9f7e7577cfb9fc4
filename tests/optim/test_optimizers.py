"""Several optimizers as one: the same numbers as each by itself, and one transaction for all."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from small import assert_same, deep_state, make_batches
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW

from safetrain import SafeTrainer, UsageError
from safetrain.optim.optimizers import OptimizerGroup, adamw, sgd
from safetrain.optim.schedule import scaled_lr


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 1), nn.Linear(6, 1)


def optimizers(model: Two) -> dict[str, torch.optim.Optimizer]:
    return {
        "first": AdamW(model.first.parameters(), lr=1e-2),
        "second": SGD(model.second.parameters(), lr=0.1, momentum=0.9),
    }


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.mse_loss(model.first(inputs), targets) + F.l1_loss(model.second(inputs), targets)


@pytest.fixture
def model() -> Two:
    return Two()


def test_numbers_are_those_of_each_by_itself(model: Two, make_trainer):
    twin, batches = copy.deepcopy(model), make_batches(20)
    group = OptimizerGroup(**optimizers(model))
    parts = {"loss_fn": loss_fn, "train_data": batches, "config": {"guards": None}}
    assert make_trainer(model, optimizer=group, **parts).fit().healthy
    by_hand = optimizers(twin)
    for batch in batches:
        loss_fn(twin, batch).backward()
        for optimizer in by_hand.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model.state_dict(), twin.state_dict())
    assert set(group.state) == set(model.parameters())


def test_a_refused_step_moves_neither(model: Two, make_trainer):
    group = OptimizerGroup(**optimizers(model))
    seen = []

    class Watched(SafeTrainer):
        def on_incident(self, incident):
            seen.append(deep_state(self))

        def on_commit(self, view):
            if view.step == 4:
                seen.append(deep_state(self))

    parts = {"loss_fn": loss_fn, "optimizer": group, "train_data": make_batches(7, bad=[5])}
    assert make_trainer(model, Watched, **parts).fit().skipped == 1
    before, after = seen
    assert_same(before, after)


def test_a_part_without_a_gradient_does_not_move(model: Two):
    group = OptimizerGroup(**optimizers(model))
    before = copy.deepcopy(model.state_dict())
    model.first(torch.randn(3, 6)).sum().backward()
    group.step()
    assert not torch.equal(model.first.weight, before["first.weight"])
    assert torch.equal(model.second.weight, before["second.weight"])


def test_a_schedule_and_a_scale_act_on_all(model: Two):
    group = OptimizerGroup(**optimizers(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(group, lambda step: 0.5**step)

    def rates() -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in group.optimizers.values()]

    with scaled_lr(group, 0.1):
        assert rates() == pytest.approx([1e-3, 1e-2])
    model.first(torch.randn(3, 6)).sum().backward()
    group.step()
    schedule.step()
    assert rates() == pytest.approx([5e-3, 5e-2])


def loaded(pair: tuple[Two, OptimizerGroup]) -> tuple[Two, OptimizerGroup]:
    twin = copy.deepcopy(pair[0])
    group = OptimizerGroup(**optimizers(twin))
    group.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    return twin, group


@pytest.mark.parametrize("copied", [loaded, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_saved_state_and_a_copy_continue_exactly(model: Two, copied: Any):
    batches = make_batches(10)

    def steps(model: Two, group: OptimizerGroup, some: list) -> None:
        for batch in some:
            loss_fn(model, batch).backward()
            group.step()
            group.zero_grad()

    group = OptimizerGroup(**optimizers(model))
    steps(model, group, batches[:5])
    twin, twin_group = copied((model, group))
    steps(model, group, batches[5:])
    steps(twin, twin_group, batches[5:])
    assert_same(model.state_dict(), twin.state_dict())
    assert_same(group.state_dict(), twin_group.state_dict())


def test_impossible_groups_are_refused(model: Two):
    with pytest.raises(UsageError, match="no optimizer"):
        OptimizerGroup()
    with pytest.raises(UsageError, match="LBFGS"):
        OptimizerGroup(only=LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="more than one parameter group"):
        OptimizerGroup(one=SGD(model.parameters(), lr=0.1), other=SGD(model.first.parameters(), lr=0.1))


@pytest.mark.parametrize(("make", "kind"), [(adamw, AdamW), (sgd, SGD)])
def test_the_usual_optimizers_are_fused_where_they_can_be(make: Any, kind: Any) -> None:
    real, complex_ = nn.Linear(2, 1), nn.Linear(2, 1, dtype=torch.complex64)
    fused, plain = make(real.parameters(), lr=0.1), make(iter(complex_.parameters()), lr=0.1)
    assert [type(fused), fused.defaults["fused"]] == [kind, True]
    assert [type(plain), plain.defaults["fused"]] == [kind, None]
    complex_(torch.ones(3, 2, dtype=torch.complex64)).abs().sum().backward()
    before = complex_.weight.detach().clone()
    plain.step()
    assert not torch.equal(before, complex_.weight)


@pytest.mark.parametrize(("make", "kind"), [(adamw, AdamW), (sgd, SGD)])
def test_their_arguments_mean_what_torch_means_by_them(make: Any, kind: Any) -> None:
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    theirs = kind(groups, lr=0.1, weight_decay=0.3, fused=True)
    assert make(groups, lr=0.1, weight_decay=0.3).state_dict() == theirs.state_dict()
    assert make(model.parameters()).defaults == kind(model.parameters(), fused=True).defaults
    with pytest.raises(ValueError, match="learning rate"):
        make(model.parameters(), lr=-1.0)
