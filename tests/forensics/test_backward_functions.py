"""The backward of a custom function that returns bad gradients, made finite."""

import math

import torch
from forensic_cases import chain
from torch import nn

from safetrain.forensics import Step, diagnose
from safetrain.forensics.backward_functions import FiniteBackward, find_function


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**3 / x  # 0/0 at 0


def gradient_of(values):
    x = torch.tensor(values, requires_grad=True)
    Cube.apply(x).sum().backward()
    return x.grad.tolist()


def test_bad_values_become_zeros_and_the_others_stay():
    patch = FiniteBackward("Cube.backward")
    plain = gradient_of([0.0, 2.0])
    with patch:
        assert gradient_of([0.0, 2.0]) == [0.0, 12.0]
    assert patch.num_hits == 1
    assert math.isnan(plain[0])
    assert math.isnan(gradient_of([0.0, 2.0])[0])  # taken off again


def test_a_function_is_found_by_its_name():
    assert find_function("Cube") is Cube
    assert find_function("NoSuchFunction") is None


def test_the_diagnosis_offers_it():
    model = chain(fc=nn.Linear(3, 3), cube=lambda h: Cube.apply(h - h.detach()))
    diagnosis = diagnose(Step(model, lambda m, b: m(b).sum(), [torch.randn(4, 3)]))
    assert diagnosis.cause.label == "custom_backward_bug"
    assert diagnosis.patch is not None
    assert isinstance(diagnosis.patch.active(), FiniteBackward)
    assert any(remedy.name == "safe_op" and remedy.finite for remedy in diagnosis.remedies)
