"""Bit-identical to torch where torch is finite; the documented value and a zero gradient where it is not."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safe_cases import CASES, HEALTHY, MASK, every, every_dtype, gradients

from safetrain import safe

NAN, INF = math.nan, math.inf


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@every(HEALTHY)
@every_dtype
def test_healthy_values_and_gradients_are_bit_identical_to_torch(case, dtype):
    inputs = case.inputs(dtype)
    ours, our_gradients = gradients(case.safe, inputs)
    theirs, their_gradients = gradients(case.plain, inputs)
    is_rounded = case.name in ("norm rows", "bce of probabilities")  # the plain form is several rounded operations
    if is_rounded and dtype.itemsize == 2:
        torch.testing.assert_close(ours, theirs)
        return
    assert same_bits(ours, theirs)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        if is_rounded:
            torch.testing.assert_close(one, other)
        else:
            assert same_bits(one, other)


@every(CASES)
@every_dtype
def test_documented_value_and_zero_gradients_at_the_singular_point(case, dtype):
    inputs = case.inputs(dtype, healthy=False)
    out, first = gradients(case.safe, inputs, create_graph=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.detach(), case.expected(dtype).expand_as(out), rtol=torch.finfo(dtype).eps, atol=0)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in first)
    if any(g.requires_grad for g in first):
        second = torch.autograd.grad(sum(g.sum() for g in first), inputs, allow_unused=True)
        assert all(g is None or torch.equal(g, torch.zeros_like(g)) for g in second)


@every(CASES)
def test_anomaly_mode_finds_no_intermediate_nan(case):
    """A NaN that is masked out later would still be reported as the first bad operation."""
    with torch.autograd.set_detect_anomaly(True):
        gradients(case.safe, case.inputs(torch.float32, healthy=False))


@every([case for case in CASES if case.plain_fails])
def test_torch_itself_fails_there(case):
    """Otherwise the tests above would prove nothing."""
    with pytest.warns() if case.name == "std rows" else torch.enable_grad():
        out, first = gradients(case.plain, case.inputs(torch.float32, healthy=False))
    assert not all(t.isfinite().all() for t in (out, *first))


@every(HEALTHY)
def test_gradients_are_correct_to_second_order(case):
    inputs = case.inputs(torch.float64)
    assert torch.autograd.gradcheck(case.safe, inputs)
    assert torch.autograd.gradgradcheck(case.safe, inputs)


@every([c for c in HEALTHY if len(c.inputs(torch.float64)) == 1])
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_nan_and_inf_propagate_as_in_torch(case, bad):
    (x,) = case.inputs(torch.float32)
    x = x.detach()
    x.view(-1)[0] = bad
    if case.name == "bce of probabilities":  # torch refuses to compute it
        assert not case.safe(x).isfinite()
        return
    ours, theirs = case.safe(x), case.plain(x)
    if case.name == "softmax":  # with NaN in the row, torch returns NaN for masked elements as well
        ours, theirs = ours[:, MASK], theirs[:, MASK]
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    if math.isnan(bad):
        assert case.safe(x).isnan().any()


ELEMENTWISE = [case for case in CASES if case.name.startswith(("log", "sqrt", "div", "pow ", "exp", "acos", "asin"))]


@every([case for case in ELEMENTWISE if case.singular != ([],) and case.name != "log_softmax"])
def test_singular_elements_do_not_change_other_elements(case):
    healthy = [each.detach().reshape(-1)[:3].requires_grad_() for each in case.inputs(torch.float32)]
    singular = case.inputs(torch.float32, healthy=False)
    mixed = [torch.cat(pair).detach().requires_grad_() for pair in zip(healthy, singular, strict=True)]
    out, first = gradients(case.safe, mixed)
    alone, alone_first = gradients(case.safe, healthy)
    assert torch.equal(out[:3], alone)
    for gradient, expected in zip(first, alone_first, strict=True):
        assert torch.equal(gradient[:3], expected)
        assert not gradient[3:].any()


@pytest.mark.parametrize("name", ["log", "sqrt", "exp", "acos", "asin", "atanh"])
def test_integers_become_floats_as_in_torch(name):
    whole = torch.tensor([0, 1]) if name in ("exp", "acos", "asin", "sqrt") else torch.tensor([0])
    ours, theirs = getattr(safe, name)(whole), getattr(torch, name)(whole)
    assert ours.dtype == theirs.dtype == torch.float32
    if name != "log":
        assert torch.equal(ours, theirs)


def test_complex_numbers_and_non_tensors_are_refused():
    with pytest.raises(ValueError, match=r"torch\.log"):
        safe.log(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match="takes a tensor"):
        safe.sqrt(2.0)
    with pytest.raises(ValueError, match="positive p"):
        safe.norm(torch.ones(2), 0)


def test_empty_tensors():
    nothing = torch.zeros(0, requires_grad=True)
    for function in (safe.log, safe.sqrt, safe.exp, safe.acos, safe.atanh, safe.softmax, safe.log_softmax):
        assert function(nothing).shape == (0,)
    assert safe.norm(nothing) == safe.norm(nothing, math.inf) == safe.std(nothing) == safe.bce(nothing, nothing) == 0
    safe.std(nothing).backward()
    assert safe.norm(torch.zeros(2, 0), dim=1).tolist() == [0, 0]
    assert safe.std(torch.zeros(2, 0), dim=1, keepdim=True).tolist() == [[0], [0]]
    assert safe.masked_mean(nothing, nothing.bool()) == 0


UNARY = {
    "log": (safe.log, torch.log),
    "sqrt": (safe.sqrt, torch.sqrt),
    "exp": (safe.exp, torch.exp),
    "acos": (safe.acos, torch.acos),
    "asin": (safe.asin, torch.asin),
    "atanh": (safe.atanh, torch.atanh),
    "reciprocal": (lambda x: safe.div(1.0, x), lambda x: 1.0 / x),
    "div": (lambda x: safe.div(torch.ones_like(x), x), lambda x: torch.ones_like(x) / x),
    "div by number": (lambda x: safe.div(x, 0.25), lambda x: x / 0.25),
    **{
        f"pow {e}": (lambda x, e=e: safe.pow(x, e), lambda x, e=e: torch.pow(x, e))
        for e in (-3, -2, -1, -0.5, 0, 0.3, 0.5, 1, 1.5, 2, 3)
    },
    **{
        f"pow tensor {e}": (
            lambda x, e=e: safe.pow(x, torch.full_like(x, e)),
            lambda x, e=e: torch.pow(x, torch.full_like(x, e)),
        )
        for e in (-1, 0, 0.3, 2)
    },
    "pow of number": (lambda x: safe.pow(3.0, x), lambda x: torch.pow(3.0, x)),
    "pow of tensor": (lambda x: safe.pow(torch.full_like(x, 3.0), x), lambda x: torch.pow(torch.full_like(x, 3.0), x)),
    "bce": (
        lambda x: safe.bce(x, torch.ones_like(x), reduction="none"),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_every_half_precision_number(name, dtype):
    """All 65536 of them: finite in, finite out; torch's bits wherever torch's value and gradient are finite."""
    ours, theirs = UNARY[name]
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).requires_grad_()
    out, (gradient,) = gradients(ours, [x])
    plain, (plain_gradient,) = gradients(theirs, [x])
    finite = x.isfinite()
    assert out[finite].isfinite().all()
    assert gradient[finite].isfinite().all()
    torch.testing.assert_close(out[~finite], plain[~finite], rtol=0, atol=0, equal_nan=True)
    healthy = finite & plain.isfinite() & plain_gradient.isfinite()
    if dtype is torch.bfloat16:  # subnormal numbers count as zero where a reciprocal is involved
        healthy &= (x.abs() >= torch.finfo(dtype).tiny) | (x == 0)
    assert torch.equal(out[healthy], plain[healthy])
    assert torch.equal(gradient[healthy], plain_gradient[healthy])


@given(arrays("float32", st.integers(1, 8), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_values_and_gradients_of_any_finite_input_are_finite(numbers):
    x = torch.from_numpy(numbers.copy()).requires_grad_()
    functions = [ours for ours, _ in UNARY.values()] + [
        safe.softmax,
        lambda x: safe.pow(x, x.detach()),
        lambda x: safe.div(x, x.flip(0)),
        lambda x: safe.bce(x / 2, (x > 0).long(), reduction="none"),
        lambda x: safe.bce(x, (x > 0).long(), from_logits=False),
    ]
    for function in functions:
        out = function(x)
        assert out.isfinite().all()
        assert torch.autograd.grad(out.sum() if out.dim() == 0 else out.max(), x)[0].isfinite().all()
