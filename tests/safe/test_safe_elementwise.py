"""Elementwise operations: dtypes, overflow, and arguments that the table of cases cannot express."""

import math

import pytest
import torch
from safe_cases import ATANH, DTYPES, every_dtype, gradients

from safetrain import safe

NAN, INF = math.nan, math.inf


@every_dtype
def test_atanh_is_clamped_to_the_last_number_before_one(dtype):
    x = torch.tensor([1.0, -1.0, 5.0, 0.0], dtype=dtype, requires_grad=True)
    out, (gradient,) = gradients(ATANH.safe, [x])
    last = torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype)) if dtype.itemsize > 2 else None
    edge = 1 - torch.finfo(dtype).eps / 2 if last is None else float(last)
    torch.testing.assert_close(
        out[:3].double(), torch.tensor([1.0, -1, 1]).double() * math.atanh(edge), rtol=0.01, atol=0
    )
    assert gradient.tolist() == [0, 0, 0, 1]


def test_an_eps_below_the_dtypes_smallest_number_is_raised():
    assert safe.log(torch.zeros(1, dtype=torch.float16), eps=1e-12).isfinite()
    assert safe.div(torch.ones(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float16), eps=1e-12) == 0
    assert safe.log(torch.zeros(1), eps=1e-3) == torch.tensor(1e-3).log()
    assert safe.div(torch.ones(1), torch.tensor([1e-4]), eps=1e-3) == 0


def test_div_by_plain_numbers_and_integers():
    x = torch.tensor([1.0, NAN])
    assert torch.equal(safe.div(x, 3.0)[:1], x[:1] / 3.0)
    by_zero = safe.div(x, 0)
    assert by_zero[0] == 0
    assert by_zero[1].isnan()
    assert safe.div(torch.tensor([1, 2]), torch.tensor([0, 4])).tolist() == [0, 0.5]
    assert safe.div(torch.tensor([1.0, 2.0]), torch.tensor([False, True])).tolist() == [0, 2]
    assert safe.div(torch.tensor([INF]), torch.tensor([0.0])).isinf()
    assert safe.div(torch.tensor([NAN, 1.0]), torch.tensor([0.0, NAN])).isnan().all()
    with pytest.raises(ValueError, match="at least one tensor"):
        safe.div(1.0, 0.0)


def test_operands_of_different_dtypes():
    half, single, double = (torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64))
    assert safe.div(half, torch.tensor(1e-8)).tolist() == [0, 0]
    assert torch.equal(safe.div(single, half * 3e-5), single / (half * 3e-5))
    assert safe.div(double, single * 0).tolist() == [0, 0]
    assert safe.div(double, torch.tensor([0, 2])).tolist() == [0, 0.5]
    assert safe.pow(single * 0, -double).tolist() == [0, 0]


def test_pow_where_torch_is_finite():
    assert safe.pow(torch.tensor([-2.0, 0.0]), 3).tolist() == [-8, 0]
    assert safe.pow(torch.tensor([-2.0, 0.0]), 0).tolist() == [1, 1]
    assert safe.pow(torch.tensor([-2.0]), -1).tolist() == [-0.5]
    assert safe.pow(torch.tensor([2, 0]), -1).tolist() == [0.5, 0]
    base = torch.tensor([-2.0, 0.0, 0.0, 3.0], requires_grad=True)
    exponent = torch.tensor([2.0, 2.0, 0.0, 2.0], requires_grad=True)
    out, (to_base, to_exponent) = gradients(safe.pow, [base, exponent], create_graph=True)
    assert out.tolist() == [4, 0, 1, 9]
    assert to_base.tolist() == [-4, 0, 0, 6]
    torch.testing.assert_close(to_exponent, torch.tensor([0, 0, 0, 9 * math.log(3)]))
    second = torch.autograd.grad(to_base.sum() + to_exponent.sum(), [base, exponent])
    assert all(g.isfinite().all() for g in second)
    assert safe.pow(torch.tensor([NAN, -2.0]), torch.tensor([0.5, NAN])).isnan().all()


def test_exp_saturates_exactly_where_torch_overflows():
    for dtype in DTYPES:
        limit = torch.tensor(math.log(torch.finfo(dtype).max), dtype=torch.float64)
        x = (limit + torch.linspace(-1, 1, 201, dtype=torch.float64)).to(dtype)
        plain = torch.exp(x)
        assert plain.isinf().any()
        assert torch.equal(safe.exp(x), plain.clamp(max=torch.finfo(dtype).max))


def test_quotients_and_derivatives_that_overflow():
    x, y = torch.tensor([1e30, -1e30, 1.0]).requires_grad_(), torch.tensor([1e-30, 1e-30, 1e-25]).requires_grad_()
    out, (to_x, to_y) = gradients(safe.div, [x, y], create_graph=True)
    largest = torch.finfo(torch.float32).max
    assert torch.equal(out, torch.tensor([largest, -largest, 1 / torch.tensor(1e-25)]))
    assert torch.equal(to_x, torch.tensor([0, 0, 1 / torch.tensor(1e-25)]))
    assert to_y.tolist() == [0, 0, 0]
    second = torch.autograd.grad(to_x.sum() + to_y.sum(), [x, y], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in second)
    assert safe.div(x, 1e-30)[0] == largest
    assert safe.div(torch.tensor([INF]), 1e-30).isinf()
