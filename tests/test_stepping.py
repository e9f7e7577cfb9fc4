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


def trained(make, step, dtype=torch.float32):
    torch.manual_seed(0)
    model = make_model(dropout=0.0).to(dtype)
    optimizer = make(list(model.parameters()))
    for batch in make_batches(5):
        optimizer.zero_grad()
        mse(model, [tensor.to(dtype) for tensor in batch]).backward()
        step(optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_numbers_are_the_same(make):
    assert_same(trained(make, lambda optimizer: optimizer.step()), trained(make, stepping.step))


OPEN_FORM = {
    "sgd": (torch.optim.SGD, [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}]),
    "adam": (torch.optim.Adam, [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.1}]),
    "adamw": (torch.optim.AdamW, [{}, {"amsgrad": True}, {"weight_decay": 0.0}, {"maximize": True}]),
    "rmsprop": (torch.optim.RMSprop, [{}, {"momentum": 0.9}, {"centered": True, "weight_decay": 0.1}]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, several in OPEN_FORM.values() for options in several],
    ids=[f"{name}-{'-'.join(options) or 'default'}" for name, (_, several) in OPEN_FORM.items() for options in several],
)
def test_all_tensors_at_once_give_the_same_bits(kind, options, dtype):
    forms = []

    def at_once(optimizer):
        groups = stepping.small_groups(optimizer)
        seen = optimizer.register_step_pre_hook(lambda o, *_: forms.append([g["foreach"] for g in o.param_groups]))
        stepping.step(optimizer, groups)
        seen.remove()
        stepping.step(optimizer, groups)

    def one_by_one(optimizer):
        optimizer.step()
        optimizer.step()

    def make(parameters):
        return kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.01, **options)

    assert_same(trained(make, one_by_one, dtype), trained(make, at_once, dtype))
    assert forms
    assert all(form == [True, True] for form in forms)


def test_every_optimizer_with_an_open_form_is_compared_above():
    assert {kind for kind, _ in OPEN_FORM.values()} == stepping._SAME_AT_ONCE


@pytest.mark.parametrize(
    "options",
    [
        {"foreach": False},
        {"fused": True},
        {"differentiable": True},
        {"lr": torch.tensor(0.1)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_the_user_chose_stays(options):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    assert stepping.small_groups(optimizer) == [0]
    assert not stepping._leaves_form_open(optimizer.param_groups[0])


def test_large_groups_and_foreign_optimizers_go_one_by_one():
    def small(*sizes, kind=torch.optim.AdamW):
        return stepping.small_groups(kind([torch.nn.Parameter(torch.ones(size)) for size in sizes]))

    class Own(torch.optim.AdamW):
        pass

    assert small(10, 10) == [0]
    assert small(10) == []
    assert small(10, 2**18) == []
    assert small(10, 10, kind=Own) == []
    assert stepping.small_groups(torch.optim.SGD(torch.nn.Linear(2, 2).bfloat16().parameters())) == []


def test_the_form_is_open_again_after_a_step_that_raised(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]})
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stepping.step(optimizer, stepping.small_groups(optimizer))
    assert [group["foreach"] for group in optimizer.param_groups] == [None, None]


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
