"""Softmax and cross-entropy: masks, saturated probabilities, weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from safe_cases import every_dtype, smallest

from safetrain import safe

NAN = math.nan


@every_dtype
def test_probabilities_of_exactly_zero_and_one(dtype):
    p = torch.tensor([0.0, 1.0, 0.0, 1.0, -0.5, 1.5], dtype=dtype, requires_grad=True)
    target = torch.tensor([1, 0, 0, 1, 0, 1])
    loss = safe.bce(p, target, from_logits=False, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), p)
    worst = -math.log(smallest(dtype))
    torch.testing.assert_close(loss.double(), torch.tensor([worst, worst, 0, 0, 0, 0]).double(), rtol=0.01, atol=1e-6)
    # The true slope where the prediction is right, zero where it is clamped.
    assert gradient.tolist() == [0, 0, 1, -1, 0, 0]


def test_saturated_logits_keep_their_gradient():
    logits = torch.tensor([1000.0, -1000.0, 1000.0], requires_grad=True)
    loss = safe.bce(logits, torch.tensor([0, 1, 1]), reduction="sum")
    loss.backward()
    assert loss.item() == 2000
    assert logits.grad.tolist() == [1, -1, 0]


def test_bce_mask_weight_and_shape():
    logits, target = torch.tensor([0.3, NAN, -2.0]), torch.tensor([1.0, 0.0, 0.0])
    mask = torch.tensor([True, False, True])
    kept = F.binary_cross_entropy_with_logits(logits[mask], target[mask])
    assert torch.equal(safe.bce(logits, target, mask=mask), kept)
    assert safe.bce(logits, target, mask=mask, reduction="none")[1] == 0
    learning = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(safe.bce(learning, target, mask=mask), learning)
    assert gradient[1] == 0
    assert gradient.isfinite().all()
    assert safe.bce(logits, target, mask=torch.zeros(3, dtype=torch.bool)) == 0
    assert safe.bce(logits, target).isnan()
    weight = torch.tensor([2.0, 1.0, 0.5])
    x = torch.randn(3)
    assert torch.equal(
        safe.bce(x, target, weight=weight, pos_weight=weight),
        F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=weight),
    )
    with pytest.raises(ValueError, match="same shape"):
        safe.bce(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="logits only"):
        safe.bce(x.sigmoid(), target, from_logits=False, pos_weight=weight)
    with pytest.raises(ValueError, match="reduction"):
        safe.bce(x, target, reduction="average")


def test_partly_masked_log_softmax_is_finite_and_exact_elsewhere():
    x = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    out = safe.log_softmax(x, mask=mask)
    floor = safe.log(torch.zeros(()))
    assert torch.equal(out[0, :2], torch.log_softmax(x[0, :2], 0))
    torch.testing.assert_close(out[~mask], floor.expand(4))
    p = safe.softmax(x, mask=mask)
    entropy = -(p * out).sum(-1)
    assert entropy[1] == 0
    (first,) = torch.autograd.grad(entropy.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    assert not first[~mask].any()
    assert not second[~mask].any()
    assert second.isfinite().all()


def test_masked_values_are_ignored():
    x = torch.tensor([[1.0, NAN, 3.0]], requires_grad=True)
    mask = torch.tensor([1, 0, 1])
    assert safe.softmax(x, mask=mask).isfinite().all()
    mean = safe.masked_mean(x, mask)
    mean.sum().backward()
    assert mean == 2
    assert x.grad.tolist() == [[0.5, 0, 0.5]]
    assert safe.softmax(x).isnan().all()


def test_a_float_mask_is_refused():
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        safe.softmax(torch.zeros(3), mask=torch.zeros(3))
    with pytest.raises(ValueError, match=r"mask\.bool\(\)"):
        safe.masked_mean(torch.zeros(3), torch.ones(3))
