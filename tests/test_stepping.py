"""The shortcut around an optimizer's wrapper is taken only when nobody would notice."""

import copy
import functools
import pickle

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch.optim.optimizer import register_optimizer_step_post_hook

from safetrain._private.torch_optim import quiet_step
from safetrain.optim import stepping
from safetrain.optim.optimizers import OptimizerGroup
from safetrain.optim.stepping import Stepper

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def by_torch(optimizer):
    return optimizer.step


def by_us(optimizer):
    return Stepper(optimizer).step


def trained(make, step, dtype=torch.float32):
    torch.manual_seed(0)
    model = make_model(dropout=0.0).to(dtype)
    optimizer = make(list(model.parameters()))
    step = step(optimizer)
    for batch in make_batches(5):
        optimizer.zero_grad()
        mse(model, [tensor.to(dtype) for tensor in batch]).backward()
        step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_numbers_are_the_same(make):
    assert_same(trained(make, by_torch), trained(make, by_us))


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
        stepper = Stepper(optimizer)

        def twice():
            seen = optimizer.register_step_pre_hook(lambda o, *_: forms.append([g["foreach"] for g in o.param_groups]))
            stepper.step()
            seen.remove()
            stepper.step()

        return twice

    def one_by_one(optimizer):
        return lambda: (optimizer.step(), optimizer.step())

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
    assert stepping._small_groups(optimizer) == [0]
    assert not stepping._leaves_form_open(optimizer.param_groups[0])


def test_large_groups_and_foreign_optimizers_go_one_by_one():
    def small(*sizes, kind=torch.optim.AdamW):
        return stepping._small_groups(kind([torch.nn.Parameter(torch.ones(size)) for size in sizes]))

    class Own(torch.optim.AdamW):
        pass

    assert small(10, 10) == [0]
    assert small(10) == []
    assert small(10, 2**18) == []
    assert small(10, 10, kind=Own) == []
    assert stepping._small_groups(torch.optim.SGD(torch.nn.Linear(2, 2).bfloat16().parameters())) == []


def test_the_form_is_open_again_after_a_step_that_raised(optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]})
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Stepper(optimizer).step()
    assert [group["foreach"] for group in optimizer.param_groups] == [None, None]


@pytest.fixture
def optimizer():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter])


def test_the_shortcut_exists_for_the_torch_that_is_installed(optimizer):
    assert quiet_step(optimizer) is not None


def test_hooks_are_called(optimizer):
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    Stepper(optimizer).step()
    assert called == ["before", "after"]


def test_global_hooks_are_called(optimizer):
    called = []
    handle = register_optimizer_step_post_hook(lambda *_: called.append("after"))
    try:
        Stepper(optimizer).step()
    finally:
        handle.remove()
    assert called == ["after"]


def test_a_profiler_sees_the_step(optimizer):
    with torch.autograd.profiler.profile() as profile:
        Stepper(optimizer).step()
    assert any("Optimizer.step#AdamW" in event.name for event in profile.function_events)


def test_a_scheduler_knows_of_the_step(optimizer, recwarn):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert quiet_step(optimizer) is not None
    del optimizer._opt_called
    Stepper(optimizer).step()
    scheduler.step()
    assert not recwarn.list  # it would warn of an update that was left out


def test_a_step_that_was_replaced_is_the_one_that_is_called(optimizer, monkeypatch):
    called = []
    monkeypatch.setattr(type(optimizer), "step", lambda self: called.append("of the class"))
    Stepper(optimizer).step()
    optimizer.step = lambda: called.append("of the instance")
    Stepper(optimizer).step()
    assert called == ["of the class", "of the instance"]


@pytest.mark.parametrize("hooked", [False, True], ids=["around torch's function", "around the wrapped one"])
def test_what_was_put_around_the_step_of_a_class_is_called(optimizer, monkeypatch, hooked):
    called, kind = [], type(optimizer)
    inner = kind.step if hooked else kind.step.__wrapped__

    @functools.wraps(inner)  # copies the marks by which torch knows its own wrappers
    def counted(self, closure=None):
        called.append("counted")
        return inner(self, closure)

    monkeypatch.setattr(kind, "step", counted if hooked else torch.optim.Optimizer.profile_hook_step(counted))
    kind.step.hooked = True
    Stepper(optimizer).step()
    Stepper(optimizer).step()
    assert called == ["counted", "counted"]


def test_an_optimizer_with_a_step_of_its_own_is_stepped():
    class Halving(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.5})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)

    parameter = torch.nn.Parameter(torch.ones(2))
    Stepper(Halving([parameter])).step()
    assert parameter.tolist() == [0.5, 0.5]


def test_listeners_are_called_around_each_step(optimizer):
    called, stepper = [], Stepper(optimizer)
    stop = stepper.listen(lambda: called.append("before"), lambda: called.append("after"))
    stepper.step()
    stop()
    stepper.step()
    assert called == ["before", "after"]


def test_a_group_of_optimizers_gives_the_same_bits():
    def together(parameters):
        return OptimizerGroup(a=torch.optim.AdamW(parameters[:2], lr=0.1), b=torch.optim.Adam(parameters[2:], lr=0.01))

    def alone(optimizer):
        return lambda: [each.step() for each in optimizer.optimizers.values()]

    assert_same(trained(together, alone), trained(together, by_us))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda group: pickle.loads(pickle.dumps(group))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_group_of_optimizers_steps(copied):
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    group = OptimizerGroup(
        a=torch.optim.AdamW(parameters[:1], lr=0.1), b=torch.optim.SGD(parameters[1:], lr=0.1, momentum=0.9)
    )
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    group.step()
    other = copied(group)
    for each in (group, other):
        for parameter in (p for part in each.param_groups for p in part["params"]):
            parameter.grad = torch.ones(3)
        each.step()
    assert_same(group.state_dict(), other.state_dict())
    assert_same(*([p for part in each.param_groups for p in part["params"]] for each in (group, other)))


def test_a_group_that_has_grown_is_looked_at_again():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters[:2], lr=0.1)
    stepper, forms = Stepper(optimizer), []
    optimizer.register_step_pre_hook(lambda o, *_: forms.append(o.param_groups[0]["foreach"]))
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    stepper.step()
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    stepper.step()
    assert forms == [True, None]


def test_parameters_that_share_memory_go_one_by_one():
    memory = torch.randn(10)
    assert (
        stepping._small_groups(torch.optim.SGD([torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[4:])])) == []
    )


def test_grad_mode_is_the_users_in_an_optimizer_of_the_users():
    seen = []

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.5})

        def step(self, closure=None):
            seen.append(torch.is_grad_enabled())

    Stepper(Own([torch.nn.Parameter(torch.ones(2))])).step()
    assert seen == [True]
