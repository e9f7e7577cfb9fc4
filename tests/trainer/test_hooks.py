"""Hooks of a subclass are called, or the class cannot be created."""

import re

import pytest
import torch
from small import make_batches, make_model, mse
from torch import nn

from safetrain import Guard, Incident, SafeTrainer, StepView, UsageError, Verdict

LINEAR = nn.Linear(1, 1)


class ByHooks(SafeTrainer):
    """Everything comes from hooks; nothing is passed to the constructor but settings."""

    def build_model(self):
        return make_model()

    def build_data(self):
        return make_batches(6, bad=(2,)), make_batches(2)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def training_step(self, model, batch):
        return {"loss": mse(model, batch), "batch_size": len(batch[0])}

    def evaluation_step(self, model, batch):
        return {"loss": mse(model, batch), "error": model(batch[0]).abs().mean()}

    def on_commit(self, view):
        self.seen = [*getattr(self, "seen", []), view]

    def on_incident(self, incident):
        self.seen = [*getattr(self, "seen", []), incident]


def test_every_hook_is_called(tmp_path):
    trainer = ByHooks(run_dir=tmp_path / "run", config={"logging": {"console": "off", "tensorboard": False}})
    result = trainer.fit()
    kinds = [type(each) for each in trainer.seen]
    assert kinds == [StepView, StepView, Incident, StepView, StepView, StepView]
    assert trainer.seen[0].metrics == {"batch_size": 8}
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5 * 0.5**5
    assert set(result.evaluations[-1]) == {"step", "loss", "error"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainin_step", "training_step"),
        ("training_steps", "training_step"),
        ("build_optimiser", "build_optimizer"),
        ("validation_step", "evaluation_step"),
        ("configure_optimizers", "build_optimizer"),
        ("on_commited", "on_commit"),
    ],
)
@pytest.mark.parametrize("base", [SafeTrainer, ByHooks])
def test_a_misspelt_hook_is_an_error_at_class_creation(base, name, meant):
    mistake = {name: lambda self, *_: None}
    for bases, body in (((base,), mistake), ((type("Mixin", (), mistake), base), {})):
        with pytest.raises(TypeError, match=rf"{name} would never be called: did you mean {meant}\?"):
            type("Mine", bases, body)


@pytest.mark.parametrize(
    ("name", "hook", "message"),
    [
        ("on_train_start", lambda self: None, "on_incident"),  # the hooks that there are
        ("on_epoch_end", lambda self: None, "cannot be called as on_epoch_end"),
        ("training_step", lambda self, batch: None, "cannot be called as training_step"),
        *(
            (name, staticmethod(lambda model, batch: None), f"{name} would never be called")
            for name in ("eval_step", "build_dataloader", "build_loss", "trainig_step")
        ),
    ],
)
def test_a_hook_that_does_not_exist_or_takes_something_else_is_an_error(name, hook, message):
    with pytest.raises(TypeError, match=message):
        type("Mine", (SafeTrainer,), {name: hook})


@pytest.mark.parametrize(("name", "meant"), [("lern", "learn"), ("limit", "limits"), ("load_state", "load_state_dict")])
def test_a_misspelt_method_of_a_guard_is_an_error_too(name, meant):
    with pytest.raises(TypeError, match=rf"{name} would never be called: did you mean {meant}\?"):
        type("Mine", (Guard,), {"judge": lambda self, view: Verdict(), name: lambda self, *_: None})


@pytest.mark.parametrize("name", ["on_forward", "learned", "judged"])
def test_other_methods_of_a_guard_are_allowed(name):
    own = {"judge": lambda self, view: Verdict(), "learn": lambda self, view, decision: None, name: lambda self, *_: 3}
    assert getattr(type("Mine", (Guard,), own), name)(None) == 3


def test_a_method_of_a_guard_with_the_wrong_parameters_is_an_error():
    with pytest.raises(TypeError, match="cannot be called as learn"):
        type("Mine", (Guard,), {"judge": lambda self, view: Verdict(), "learn": lambda self, view: None})


def test_other_methods_of_a_subclass_are_allowed():
    cls = type("Mine", (SafeTrainer,), {"_training_steps": lambda self: 1, "penalty": lambda self: 2})
    assert cls.penalty(None) == 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "there is no model"),
        ({"model": make_model}, "must be a torch.nn.Module"),
        ({"model": nn.Identity()}, "no trainable parameters"),
        ({"model": nn.Linear(1, 1).requires_grad_(False)}, "no trainable parameters"),
        ({"model": nn.Linear(1, 1)}, "there is no training data"),
        ({"model": nn.Linear(1, 1), "optimizer": "adam"}, "torch.optim.Optimizer"),
        ({"model": nn.Linear(1, 1), "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "none of the optimizer's"),
        ({"model": LINEAR, "optimizer": torch.optim.LBFGS(LINEAR.parameters()), "train_data": []}, "LBFGS"),
        ({"model": nn.Linear(1, 1), "loss_fn": 3}, "loss_fn must be callable"),
        ({"model": nn.Linear(1, 1), "train_data": 3}, "not iterable"),
        ({"model": nn.Linear(1, 1), "train_data": [], "guards": ["finite"]}, "guards must be Guard instances"),
    ],
)  # fmt: skip
def test_unusable_parts_are_errors_with_a_fix(parts, message):
    with pytest.raises(UsageError, match=message) as error:
        SafeTrainer(**parts)
    assert "To fix" in str(error.value) or "torch.optim.Optimizer" in message


def test_a_run_without_a_loss_is_an_error(tmp_path):
    trainer = SafeTrainer(nn.Linear(6, 1), train_data=make_batches(1), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="nothing to compute the loss with"):
        trainer.fit()


def test_fit_is_called_once(make_trainer):
    trainer = make_trainer(train_data=make_batches(1))
    with pytest.raises(UsageError, match="no run yet"):
        trainer.run  # noqa: B018
    trainer.fit()
    with pytest.raises(UsageError, match="already called"):
        trainer.fit()


def test_a_hook_may_be_a_static_method(make_trainer):
    class Static(SafeTrainer):
        @staticmethod
        def training_step(model, batch):
            return mse(model, batch)

    assert make_trainer(cls=Static, train_data=make_batches(2)).fit().steps == 2


class Quiet(Guard):
    def judge(self, view):
        return Verdict()


def test_two_guards_of_one_name_are_an_error(make_trainer):
    with pytest.raises(UsageError, match="two guards of the name 'quiet'"):
        make_trainer(train_data=make_batches(2), guards=[Quiet(), Quiet()])
    other = Quiet()
    other.name = "other"
    trainer = make_trainer(train_data=make_batches(2), guards=[Quiet(), other])
    assert {"quiet", "other"} <= {guard.name for guard in trainer.guards}


@pytest.mark.parametrize(
    "body",
    [
        {"run": lambda self, epochs: None},
        {"step": 0},
        {"stop": lambda self: None},
        {"rollback": True},
        {"_save": lambda self, path: None},
    ],
)
def test_a_name_of_the_trainers_cannot_be_given_another_meaning(body):
    (name,) = body
    with pytest.raises(TypeError, match=f"Mine.{name} replaces SafeTrainer.{name}"):
        type("Mine", (SafeTrainer,), body)


def test_a_method_of_the_trainers_may_be_extended():
    class Mine(SafeTrainer):
        def stop(self, reason="enough"):
            super().stop(reason)

    assert Mine


def test_a_part_that_the_constructor_sets_cannot_be_a_method_nor_replaced(make_trainer):
    with pytest.raises(TypeError, match=r"Mine.optimizer would never be used.*\nTo fix: build_optimizer"):
        type("Mine", (SafeTrainer,), {"optimizer": lambda self: None})
    trainer = make_trainer(train_data=make_batches(1))
    trainer.evaluation = None
    with pytest.raises(UsageError, match="attribute evaluation of the trainer was replaced by a NoneType"):
        trainer.fit()


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("max_epochs", 'config={"loop": {"max_epochs": …}}'),
        ("epochs", 'config={"loop": {"max_epochs": …}}'),
        ("batch_size", 'config={"data": {"batch_size": …}}'),
        ("seed", 'config={"seed": …}'),
        ("max_grad_norm", 'config={"guards": {"clip": {"max_norm": …}}}'),
        ("val_data", "eval_data=… instead of val_data=…"),
        ("criterion", "loss_fn=… instead of criterion=…"),
        ("optimiser", "optimizer=… instead of optimiser=…"),
        ("colour", "its arguments are loss_fn, optimizer, train_data"),
    ],
)
def test_an_argument_that_there_is_not_is_an_error_that_says_what_to_write(given, instead):
    with pytest.raises(UsageError, match=re.escape(instead)):
        SafeTrainer(make_model(), **{given: 1})


def test_a_subclass_that_does_not_call_the_constructor_is_an_error_that_says_so():
    class Own(SafeTrainer):
        def __init__(self, rate):
            self.rate = rate

    for method in (Own(0.1).fit, Own(0.1).check):
        with pytest.raises(UsageError, match=r"super\(\).__init__\(model"):
            method()
