"""The shortcut around an optimizer's wrapper is taken only when nobody would notice."""

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch.optim.optimizer import register_optimizer_step_post_hook

from safetrain import stepping

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def trained(make, step):
    torch.manual_seed(0)
    model = make_model(dropout=0.0)
    optimizer = make(model.parameters())
    for batch in make_batches(5):
        optimizer.zero_grad()
        mse(model, batch).backward()
        step(optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_numbers_are_the_same(make):
    assert_same(trained(make, lambda optimizer: optimizer.step()), trained(make, stepping.step))


@pytest.fixture
def optimizer():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter])


def test_the_shortcut_exists_for_the_torch_that_is_installed(optimizer):
    assert stepping._inner(optimizer) is not None


def test_hooks_are_called(optimizer):
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    stepping.step(optimizer)
    assert called == ["before", "after"]


def test_global_hooks_are_called(optimizer):
    called = []
    handle = register_optimizer_step_post_hook(lambda *_: called.append("after"))
    try:
        stepping.step(optimizer)
    finally:
        handle.remove()
    assert called == ["after"]


def test_a_profiler_sees_the_step(optimizer):
    with torch.autograd.profiler.profile() as profile:
        stepping.step(optimizer)
    assert any("Optimizer.step#AdamW" in event.name for event in profile.function_events)


def test_a_scheduler_knows_of_the_step(optimizer, recwarn):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepping.step(optimizer)
    scheduler.step()
    assert not recwarn.list  # it would warn of an update that was left out


def test_a_step_that_was_replaced_is_the_one_that_is_called(optimizer, monkeypatch):
    called = []
    monkeypatch.setattr(type(optimizer), "step", lambda self: called.append("of the class"))
    stepping.step(optimizer)
    optimizer.step = lambda: called.append("of the instance")
    stepping.step(optimizer)
    assert called == ["of the class", "of the instance"]


def test_an_optimizer_with_a_step_of_its_own_is_stepped():
    class Halving(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)

    parameter = torch.nn.Parameter(torch.ones(2))
    stepping.step(Halving([parameter]))
    assert parameter.tolist() == [0.5, 0.5]
