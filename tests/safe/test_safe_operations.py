"""Same bits as torch where torch is well; the documented value and a zero gradient where it is not."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safe_cases import ATANH, CASES, DTYPES, HEALTHY, MASK, smallest

from safetrain import safe

NAN, INF = math.nan, math.inf


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "-"))


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradients(function, inputs, create_graph=False):
    out = function(*inputs)
    return out, torch.autograd.grad(out.sum(), inputs, create_graph=create_graph)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@by_name(HEALTHY)
@every_dtype
def test_healthy_values_and_gradients_are_torchs_bit_for_bit(case, dtype):
    inputs = case.inputs(dtype)
    ours, our_gradients = gradients(case.safe, inputs)
    theirs, their_gradients = gradients(case.plain, inputs)
    if dtype.itemsize == 2 and case.name in (
        "norm rows",
        "bce of probabilities",
    ):  # spelled in several rounded operations
        torch.testing.assert_close(ours, theirs)
        return
    assert same_bits(ours, theirs)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        if case.name in ("norm rows", "bce of probabilities"):  # the same derivative, by another formula
            torch.testing.assert_close(one, other)
        else:
            assert same_bits(one, other)


@by_name(CASES)
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


@by_name(CASES)
def test_anomaly_mode_finds_no_nan_on_the_way(case):
    """A NaN that is only cut off later would still be blamed by whoever looks at every operation."""
    with torch.autograd.set_detect_anomaly(True):
        gradients(case.safe, case.inputs(torch.float32, healthy=False))


@by_name([case for case in CASES if case.plain_fails])
def test_torch_itself_fails_there(case):
    """Guards the test above: a case that torch survives would prove nothing."""
    with pytest.warns() if case.name == "std rows" else torch.enable_grad():
        out, first = gradients(case.plain, case.inputs(torch.float32, healthy=False))
    assert not all(t.isfinite().all() for t in (out, *first))


@by_name(HEALTHY)
def test_gradients_are_right_to_second_order(case):
    inputs = case.inputs(torch.float64)
    assert torch.autograd.gradcheck(case.safe, inputs)
    assert torch.autograd.gradgradcheck(case.safe, inputs)


@by_name([c for c in HEALTHY if len(c.inputs(torch.float64)) == 1])
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_bad_input_is_passed_on_as_torch_does(case, bad):
    (x,) = case.inputs(torch.float32)
    x = x.detach()
    x.view(-1)[0] = bad
    if case.name == "bce of probabilities":  # torch refuses to compute it
        assert not case.safe(x).isfinite()
        return
    ours, theirs = case.safe(x), case.plain(x)
    if case.name == "softmax":  # with NaN in the row, torch gives NaN to what is masked out as well
        ours, theirs = ours[:, MASK], theirs[:, MASK]
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    if math.isnan(bad):
        assert case.safe(x).isnan().any()


ELEMENTWISE = [case for case in CASES if case.name.startswith(("log", "sqrt", "div", "pow ", "exp", "acos", "asin"))]


@by_name([case for case in ELEMENTWISE if case.singular != ([],) and case.name != "log_softmax"])
def test_singular_places_leave_the_healthy_ones_beside_them_alone(case):
    healthy = [each.detach().reshape(-1)[:3].requires_grad_() for each in case.inputs(torch.float32)]
    singular = case.inputs(torch.float32, healthy=False)
    mixed = [torch.cat(pair).detach().requires_grad_() for pair in zip(healthy, singular, strict=True)]
    out, first = gradients(case.safe, mixed)
    alone, alone_first = gradients(case.safe, healthy)
    assert torch.equal(out[:3], alone)
    for gradient, expected in zip(first, alone_first, strict=True):
        assert torch.equal(gradient[:3], expected)
        assert not gradient[3:].any()


@pytest.mark.parametrize("function", [safe.norm, safe.std], ids=["norm", "std"])
def test_a_singular_row_leaves_the_others_alone(function):
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


# Places that the table cannot express.


@every_dtype
def test_atanh_stops_at_the_last_number_before_one(dtype):
    x = torch.tensor([1.0, -1.0, 5.0, 0.0], dtype=dtype, requires_grad=True)
    out, (gradient,) = gradients(ATANH.safe, [x])
    last = torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype)) if dtype.itemsize > 2 else None
    edge = 1 - torch.finfo(dtype).eps / 2 if last is None else float(last)
    torch.testing.assert_close(
        out[:3].double(), torch.tensor([1.0, -1, 1]).double() * math.atanh(edge), rtol=0.01, atol=0
    )
    assert gradient.tolist() == [0, 0, 0, 1]


@every_dtype
def test_probabilities_of_exactly_zero_and_one(dtype):
    p = torch.tensor([0.0, 1.0, 0.0, 1.0, -0.5, 1.5], dtype=dtype, requires_grad=True)
    target = torch.tensor([1, 0, 0, 1, 0, 1])
    loss = safe.bce(p, target, from_logits=False, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), p)
    worst = -math.log(smallest(dtype))
    torch.testing.assert_close(loss.double(), torch.tensor([worst, worst, 0, 0, 0, 0]).double(), rtol=0.01, atol=1e-6)
    assert gradient.tolist() == [
        0,
        0,
        1,
        -1,
        0,
        0,
    ]  # the true slope where the prediction is right, zero where it is clamped


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


def test_what_is_masked_out_is_not_looked_at():
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


def test_masked_mean_of_float16_whose_sum_overflows():
    x = torch.full((1000,), 1000.0, dtype=torch.float16)
    assert safe.masked_mean(x, x > 0) == 1000


def test_masked_mean_broadcasts_and_counts_the_broadcast_mask():
    x, mask = torch.arange(6.0).reshape(2, 3), torch.tensor([[True], [False]])
    assert safe.masked_mean(x, mask) == 1
    assert safe.masked_mean(x, mask, dim=1, keepdim=True, empty=-1).tolist() == [[1], [-1]]
    assert safe.masked_mean(x, mask, dim=(0, 1)) == 1


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_norm_and_std_whose_squares_do_not_fit(size):
    x = (torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 1.0]]) * torch.tensor([[size], [1], [1]])).requires_grad_()
    length = safe.norm(x, dim=1)
    length.sum().backward()
    torch.testing.assert_close(length[0] / size, torch.tensor(5.0))
    torch.testing.assert_close(x.grad, torch.tensor([[0.6, 0.8], [0, 0], [0.5**0.5, 0.5**0.5]]))
    torch.testing.assert_close(safe.normalize(x)[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(safe.std(x, dim=1)[0] / size, torch.tensor(0.5**0.5))


def test_short_vectors_have_a_direction_in_float16():
    x = torch.tensor([[3e-4, 4e-4]], dtype=torch.float16)
    torch.testing.assert_close(safe.normalize(x), torch.tensor([[0.6, 0.8]], dtype=torch.float16), rtol=1e-2, atol=0)
    zero = torch.zeros(1, 2, dtype=torch.float16)
    assert F.normalize(zero).isnan().all() or F.normalize(zero).eq(0).all()
    assert not safe.normalize(zero).any()


def test_an_eps_that_the_dtype_cannot_hold_is_raised_to_its_smallest_number():
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


def test_operands_are_judged_in_the_dtype_of_the_result():
    half, single, double = (torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64))
    assert safe.div(half, torch.tensor(1e-8)).tolist() == [0, 0]
    assert torch.equal(safe.div(single, half * 3e-5), single / (half * 3e-5))
    assert safe.div(double, single * 0).tolist() == [0, 0]
    assert safe.div(double, torch.tensor([0, 2])).tolist() == [0, 0.5]
    assert safe.pow(single * 0, -double).tolist() == [0, 0]


def test_pow_keeps_what_is_defined():
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


def test_quotients_and_slopes_that_are_too_large():
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
        for e in (-2, -1, -0.5, 0, 0.3, 0.5, 1, 1.5, 2, 3)
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
def test_all_there_is_in_half_precision(name, dtype):
    """Every one of the 65536 numbers: finite in, finite out; torch's bits wherever torch's value and gradient are finite."""
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
    for function in (
        safe.log,
        safe.sqrt,
        safe.exp,
        safe.acos,
        safe.asin,
        safe.atanh,
        safe.softmax,
        lambda x: safe.pow(x, 0.5),
        lambda x: safe.pow(x, -3),
        lambda x: safe.pow(x, x.detach()),
        lambda x: safe.div(1.0, x),
        lambda x: safe.div(x, x.flip(0)),
        lambda x: safe.bce(x / 2, (x > 0).long(), reduction="none"),
        lambda x: safe.bce(x, (x > 0).long(), from_logits=False),
    ):
        out = function(x)
        assert out.isfinite().all()
        assert torch.autograd.grad(out.sum() if out.dim() == 0 else out.max(), x)[0].isfinite().all()
