"""Small gradients are looked at as one: the norm is right, what is clipped is clipped as torch does it, and no write is missed."""

import math

import pytest
import torch
from small import assert_same, make_batches, make_model, mse
from torch import nn

from safetrain import Guard, SafeTrainer, Verdict
from safetrain.core.view import Limits, StepView
from safetrain.tensors import gradients
from safetrain.tensors.copies import Joined

SHAPES = [(5, 3), (1,), (64, 33), (7,), (2, 3, 4), (300,), ()]


def make_parameters(scale=1.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, dtype=dtype, generator=generator)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1.0, 1e15])
def test_the_norm_is_that_of_torch_but_for_its_last_digits(scale, dtype):
    for seed in range(20):
        grads = gradients.collect(make_parameters(scale, dtype, seed))
        ours, theirs = gradients.norm_of(Joined(grads)), gradients.global_norm(grads)
        assert float(ours) == pytest.approx(float(theirs), rel=gradients.NEAR / 10)


def hard_to_sum(seed, count=64, size=4096):
    """A few large values among many small ones, whose squares are lost one by one when they are added to the large one's."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.full((size,), 10 ** float(-3.3 - torch.rand((), generator=generator)))
    for index in torch.randint(count, (8,), generator=generator).tolist():
        parameters[index].grad[: int(torch.randint(1, 64, (), generator=generator))] = 1.0
    return parameters


def test_the_two_norms_are_never_further_apart_than_is_said():
    apart = []
    for seed in range(30):
        grads = gradients.collect(hard_to_sum(seed))
        apart.append(abs(float(gradients.norm_of(Joined(grads))) / float(gradients.global_norm(grads)) - 1))
    assert 1e-5 < max(apart) < gradients.NEAR  # far more than of random numbers


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_norm(value):
    grads = gradients.collect(make_parameters())
    grads[3][2] = value
    assert not math.isfinite(float(gradients.norm_of(Joined(grads))))


@pytest.mark.parametrize("make", [lambda seed: make_parameters(seed=seed), hard_to_sum], ids=["random", "hard to sum"])
@pytest.mark.parametrize("above", [-1e-1, -1e-2, -1e-3, -1e-5, -1e-7, 0.0, 1e-7, 1e-5, 1e-3, 1e-2, 1.0])
def test_around_the_limit_the_bits_are_those_of_clip_grad_norm(make, above):
    for seed in range(10):
        ours, theirs = make(seed), make(seed)
        limit = float(gradients.global_norm(gradients.collect(ours))) / (1 + above)
        known = float(gradients.norm_of(Joined(gradients.collect(ours))))
        view = StepView(step=0, loss=0.0, grad_norm=known)
        gradients.clip([ours], ours, Limits(norm=limit), None, view)
        nn.utils.clip_grad_norm_(theirs, limit)
        assert_same(gradients.collect(ours), gradients.collect(theirs))


def test_a_norm_that_overflows_only_as_torch_computes_it_is_bounded():
    parameters = make_parameters()
    biggest = torch.finfo(torch.float32).max ** 0.5
    for parameter in parameters:
        parameter.grad.fill_(biggest / 10)
    view = StepView(step=0, loss=0.0, grad_norm=1e19)  # of a sum that was just within the type
    assert math.isinf(float(gradients.global_norm(gradients.collect(parameters))))
    gradients.clip([parameters], parameters, Limits(norm=1.0), None, view)
    assert float(gradients.global_norm(gradients.collect(parameters))) == pytest.approx(1.0, rel=1e-4)


def test_joined_tensors_know_whether_they_still_are():
    grads = gradients.collect(make_parameters())
    joined = Joined(grads)
    assert joined.still_hold(list(grads))
    assert not joined.still_hold(grads[:-1])
    assert not joined.still_hold([grads[1], grads[0], *grads[2:]])
    assert not joined.still_hold([grads[0].clone(), *grads[1:]])
    grads[4].mul_(2)
    assert not joined.still_hold(grads)


@pytest.mark.parametrize(
    ("parameters", "are"),
    [
        ([torch.zeros(4096)] * 6, True),
        ([torch.zeros(4097)] * 6, False),
        ([torch.zeros(8000), torch.zeros(2)], True),
        ([torch.zeros(4096)] * 65, False),  # more than one pack
        ([torch.zeros(3, dtype=torch.bfloat16)] * 2, False),  # its norm has three digits
        ([torch.zeros(3, dtype=torch.float64)] * 2, True),
    ],
)
def test_only_small_ones_are_joined(parameters, are):
    assert gradients.are_better_joined(parameters) is are


class Doubles(Guard):
    """Does what it should not: writes to the gradients that it is shown."""

    def measure(self, step):
        for gradient in step.gradients:
            gradient.mul_(2)
        return {}

    def judge(self, view):
        return Verdict()


class Hides(Doubles):
    """In a way that torch does not know of."""

    def measure(self, step):
        for gradient in step.gradients:
            gradient.data.mul_(2)
        return {}


class Replaces(Doubles):
    """As a hook of the user's that puts other gradients in their places."""

    def __init__(self, model):
        super().__init__()
        self._model = model

    def measure(self, step):
        for parameter in self._model.parameters():
            parameter.grad = parameter.grad * 2
        return {}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        ("nobody", None),
        ("nobody", {"mode": "norm", "max_norm": 0.5}),
        ("writes", None),
        ("hides", None),
        ("replaces", None),
    ],
    ids=["unclipped", "clipped", "written to", "written to in secret", "replaced"],
)
def test_a_run_has_the_same_bits_with_gradients_joined_and_not(tmp_path, optimizer, kind, clip):
    found = []
    for joins in (True, False):
        torch.manual_seed(0)
        model = make_model()
        guards = {"nobody": [], "writes": [Doubles()], "hides": [Hides()], "replaces": [Replaces(model)]}[kind]
        trainer = SafeTrainer(
            model,
            loss_fn=mse,
            optimizer=optimizer(model.parameters(), lr=0.01, weight_decay=0.1),
            train_data=make_batches(20),
            guards=guards,
            config={"seed": 3, "guards": {"clip": clip}, "logging": {"console": "off", "tensorboard": False}},
            run_dir=tmp_path / str(joins),
        )
        assert trainer._joins_gradients
        trainer._joins_gradients = joins
        assert trainer.fit().healthy
        found.append((model.state_dict(), trainer.optimizer.state_dict()))
    assert_same(*found)
