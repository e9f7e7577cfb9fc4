"""Norms, means and standard deviations: dimensions, broadcasting, squares that over- or underflow."""

import pytest
import torch
import torch.nn.functional as F
from safe_cases import gradients

from safetrain import safe


@pytest.mark.parametrize("function", [safe.norm, safe.std], ids=["norm", "std"])
def test_a_singular_row_does_not_change_other_rows(function):
    x = torch.randn(3, 4)
    x[1] = 0
    x.requires_grad_()
    out, (first,) = gradients(lambda x: function(x, dim=1), [x], create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    for row in (0, 2):
        alone, (expected,) = gradients(function, [x[row].detach().requires_grad_()])
        assert torch.equal(out[row], alone)
        assert torch.equal(first[row], expected)
    assert not first[1].any()
    assert not second[1].any()
    assert second.isfinite().all()


def test_masked_mean_of_float16_whose_sum_overflows():
    x = torch.full((1000,), 1000.0, dtype=torch.float16)
    assert safe.masked_mean(x, x > 0) == 1000


def test_masked_mean_broadcasts_and_counts_the_broadcast_mask():
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True], [False]])
    assert safe.masked_mean(x, mask) == 1
    assert safe.masked_mean(x, mask, dim=1, keepdim=True, empty=-1).tolist() == [[1], [-1]]
    assert safe.masked_mean(x, mask, dim=(0, 1)) == 1


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_norm_and_std_whose_squares_over_or_underflow(size):
    x = (torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]]) * torch.tensor([[size], [1], [1]])).requires_grad_()
    length = safe.norm(x, dim=1)
    length.sum().backward()
    torch.testing.assert_close(length[0] / size, torch.tensor(5.0))
    torch.testing.assert_close(x.grad, torch.tensor([[0.6, 0.8], [0, 0], [0.5**0.5, 0.5**0.5]]))
    torch.testing.assert_close(safe.normalize(x)[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(safe.std(x, dim=1)[0] / size, torch.tensor(0.5**0.5))


def test_normalize_short_vectors_in_float16():
    x = torch.tensor([[3e-4, 4e-4]], dtype=torch.float16)
    torch.testing.assert_close(safe.normalize(x), torch.tensor([[0.6, 0.8]], dtype=torch.float16), rtol=1e-2, atol=0)
    zero = torch.zeros(1, 2, dtype=torch.float16)
    assert F.normalize(zero).isnan().all() or F.normalize(zero).eq(0).all()
    assert not safe.normalize(zero).any()


def test_zero_dimensional_tensors_and_vectors():
    one = torch.tensor(3.0, requires_grad=True)
    assert safe.norm(one) == 3
    assert safe.std(one) == 0
    assert safe.masked_mean(one, torch.tensor(True)) == 3
    assert safe.cosine_similarity(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])) == 1
    torch.testing.assert_close(safe.normalize(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8]))


def test_cosine_similarity_broadcasts_and_promotes_like_torch():
    a, b = torch.randn(4, 1, 5), torch.randn(3, 5).double()
    torch.testing.assert_close(safe.cosine_similarity(a, b, dim=-1), F.cosine_similarity(a, b, dim=-1))
    a = a.double()
    assert torch.equal(safe.cosine_similarity(a, b, dim=-1), F.cosine_similarity(a, b, dim=-1))
    half_zero = safe.cosine_similarity(torch.zeros(1, 2), b[:1, :2].float())
    assert half_zero == 0
