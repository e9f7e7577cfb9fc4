"""Why the first bad operation went bad: a table of rules, first match wins.

A rule is a function of a `Finding` that returns a sentence made of the measured numbers, or None when it does not apply.
To add one, write the function with `@rule("label")` at its place in the order below, and a failure that only it explains in
tests/forensics/test_causes.py. Labels are those of core.causes; when no rule fits, the answer is `unknown` with the reason,
never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ..core.incident import Cause, describe_operand
from .finding import Finding, has_masked_zeros
from .frames import Frame, source_of, user_place
from .raised import explain_error
from .values import FINITE, INF, NAN

Rule = Callable[[Finding], str | None]
RULES: list[tuple[str, Rule]] = []

LOGARITHMS = {"log", "log2", "log10", "log1p", "xlogy", "logit", "special_xlog1py", "log_sigmoid_forward"}
EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh", "special_exp2", "special_expm1"}
DIVISIONS = {
    "div",
    "reciprocal",
    "true_divide",
    "floor_divide",
    "remainder",
    "fmod",
    "addcdiv",
    "_weight_norm_interface",
}
RESTRICTED = {
    "acos", "asin", "acosh", "atanh", "sqrt", "rsqrt", "pow", "lgamma", "digamma", "polygamma", "erfinv",
    "special_erfinv", "special_ndtri", "special_zeta", "mvlgamma", "igamma", "igammac", "atan2", "tan",
    "_standard_gamma", "special_log_ndtr",
}  # fmt: skip
NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm", "rms_norm"}
TINY = 1e-30
"""Denominators below this are zeros by underflow."""


def rule(label: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.append((label, function))
        return function

    return register


def judge(finding: Finding) -> Cause:
    if finding.error is not None:
        cause = explain_error(finding.error)
        if cause.label == "unknown" and finding.raised_by_samples:
            return Cause("bad_input_data", f"{cause.explanation}, with some samples of the batch only")
        return cause
    for label, function in RULES:
        explanation = function(finding)
        if explanation is not None:
            return Cause(label, explanation)
    what = finding.name or finding.op or "the operation"
    return Cause(
        "unknown", f"{what} gave a non-finite result and no rule explains it from its operands: {_operands(finding)}"
    )


# ---- what was bad before the step ----------------------------------------------------------------------------------


@rule("corrupt_parameter")
def corrupt_parameter(f: Finding) -> str | None:
    if f.phase != "params" or f.blame.leaf is None:
        return None
    what = f.owner if f.blame.leaf.kind == "outside" else f"{f.blame.leaf.kind} {f.owner}"
    return f"{what} was already non-finite before this step"


@rule("corrupt_parameter")
def negative_running_variance(f: Finding) -> str | None:
    if f.event is None or f.facts is None or f.event.op not in NORMS:
        return None
    variance = next((t for t in f.facts.inputs if t["name"] == "running_var"), None)
    if variance is None or not variance.get("negatives"):
        return None
    return f"the running variance of {f.name} is negative: {describe_operand(variance)}"


@rule("bad_input_data")
def bad_input_data(f: Finding) -> str | None:
    if f.phase == "data":
        return f"{f.owner} already holds non-finite values when the step begins"
    if f.phase == "forward" and f.event is not None and f.event.op.startswith("lift") and f.event.literal == NAN:
        return "a tensor made from Python or NumPy values already holds NaN"
    return None


# ---- code that makes its own gradients or updates ------------------------------------------------------------------


@rule("custom_backward_bug")
def custom_backward_bug(f: Finding) -> str | None:
    event = f.event
    if event is None or event.phase != "backward" or f.hidden or f.phase == "optimizer":
        return None
    python_node = event.node is not None and event.op == event.node
    if not (event.is_custom_backward or python_node):
        return None
    what = "uninitialised memory" if event.uninitialised else "a non-finite gradient"
    if (event.node or "0")[-1].isdigit():  # a node of torch itself: what ran is a hook
        return f"a gradient hook returns {what} although its input is finite"
    function = (event.node or "").removesuffix("Backward")
    return f"the custom backward of {function} returns {what} although its inputs are finite"


@rule("fp16_underflow")
def optimizer_underflow(f: Finding) -> str | None:
    if f.phase != "optimizer" or not f.is_low_precision or _denominator_zeros(f) == 0:
        return None
    return f"in {f.optimizer}, the denominator of the update is 0 in half precision: eps rounds to 0. {_operands(f)}"


@rule("fp16_overflow")
def optimizer_overflow_in_half(f: Finding) -> str | None:
    if f.phase != "optimizer" or not f.is_low_precision or not _overflows(f):
        return None
    return f"the arithmetic of {f.optimizer} exceeds the range of half precision: {_operands(f)}"


@rule("divergence")
def update_overflows(f: Finding) -> str | None:
    if f.phase != "optimizer" or f.is_low_precision or not _overflows(f):
        return None
    return f"the update of {f.optimizer} exceeds the range of floats, gradients or learning rate are far too large: {_operands(f)}"


@rule("optimizer_numerics")
def optimizer_numerics(f: Finding) -> str | None:
    if f.phase != "optimizer":
        return None
    if f.notes:
        return f"loss and gradients are finite; {'; '.join(f.notes)}"
    return f"loss and gradients are finite, the arithmetic of {f.optimizer} is not: {f.name} got {_operands(f)}"


# ---- masks and targets ---------------------------------------------------------------------------------------------


@rule("infeasible_target")
def infeasible_target(f: Finding) -> str | None:
    if f.event is not None and "ctc_loss" in f.event.op:
        return "no alignment exists: some target is longer than its input allows, so its loss is infinite"
    passes_softmax = any("softmax" in event.op for event in f.blame.path)
    if f.reached_by_intent and not passes_softmax and (_picks(f) or _is_lattice(f)):
        return f"{f.name} picks a position whose score is -inf: this target cannot be reached, so its loss is infinite"
    return None


@rule("neg_inf_mask")
def neg_inf_mask(f: Finding) -> str | None:
    if f.reached_by_intent:
        return f"an intended -inf reaches the loss through {f.name}: a masked position is used"
    if f.facts is not None and f.facts.all_masked_rows:
        return f"{f.name} got {f.facts.all_masked_rows} rows that hold nothing but -inf: every position is masked"
    if f.blame.conversion is not None and f.blame.conversion is f.blame.event:
        return f"an intended infinity meets {f.name}, where it is not neutral: {_operands(f)}"
    return None


@rule("neg_inf_mask")
def lowest_number_as_mask(f: Finding) -> str | None:
    if f.facts is None or f.event is None or f.event.op not in ("add", "add_", "sub", "baddbmm", "addmm"):
        return None
    for operand in f.facts.inputs:
        dtype = getattr(torch, operand["dtype"])
        if dtype.is_floating_point and operand.get("min", 0.0) <= 0.99 * torch.finfo(dtype).min:
            return f"a mask of the lowest {operand['dtype']} overflows to -inf when something is added: {_operands(f)}"
    return None


# ---- reductions and decompositions ---------------------------------------------------------------------------------


@rule("empty_reduction")
def empty_reduction(f: Finding) -> str | None:
    facts, event = f.facts, f.event
    if facts is None or event is None:
        return None
    if facts.targets:
        return f"{facts.targets}: the mean over no targets is 0/0"
    if facts.empty_input and event.kind_out == NAN:
        return f"{f.name} of an empty tensor: {_operands(f)}"
    if event.op in ("std", "var", "std_mean", "var_mean") and facts.num_reduced is not None and facts.num_reduced < 2:
        return f"{f.name} over {facts.num_reduced} value has no unbiased estimate"
    if f.name == "nanmean" and event.op == "div":
        return "nanmean of nothing but NaN: no value is left to average"
    if event.op.startswith("nll_loss") and event.kind_out == NAN and event.kind_in == FINITE:
        return "the weights of all targets in the batch add up to 0"
    return None


@rule("degenerate_decomposition")
def degenerate_decomposition(f: Finding) -> str | None:
    op = (f.forward.op if f.forward is not None else "").lstrip("_")
    if not op.startswith("linalg_") or op.startswith(("linalg_vector_norm", "linalg_cross")):
        return None
    if f.phase == "backward":
        return f"the derivative of {f.name} divides by differences of its spectrum, which has repeated or zero values"
    return f"{f.name} of a matrix that is singular or nearly so: {_operands(f)}"


# ---- low precision: beats the generic labels when the same step is harmless in single precision ---------------------


@rule("fp16_underflow")
def fp16_underflow(f: Finding) -> str | None:
    if not f.is_low_precision or f.finite_in_fp32 is False or f.event is None or f.facts is None:
        return None
    overflows = f.facts.kind_in_fp64 == FINITE and f.facts.peak_in_fp64 > 6e4
    small_input = all(abs(f.facts.inputs[0].get(bound, 0.0)) < 1e4 for bound in ("min", "max"))
    if f.event.op.removesuffix("_backward") in NORMS and small_input:
        return f"{f.name}: its eps rounds to 0 in half precision where the variance is 0. {_operands(f)}"
    if f.finite_in_fp32 and (_denominator_zeros(f) or _is_log(f)) and not overflows:
        return f"{f.name} got a zero that is no zero in single precision: {_operands(f)}"
    return None


@rule("fp16_overflow")
def fp16_overflow(f: Finding) -> str | None:
    if not f.is_low_precision or f.facts is None:
        return None
    peak = f.facts.peak_in_fp64
    if f.facts.kind_in_fp64 == FINITE and f.facts.dtype is not None and f.finite_in_fp32 is not False:
        dtype = str(f.facts.dtype).removeprefix("torch.")
        return f"{f.name} needs {peak:.3g}, beyond the range of {dtype}: {_operands(f)}"
    if f.finite_in_fp32:
        return f"{f.name} is non-finite in half precision and finite in single precision: {_operands(f)}"
    return None


# ---- gradients -----------------------------------------------------------------------------------------------------


@rule("masked_branch_gradient")
def masked_branch_gradient(f: Finding) -> str | None:
    if f.hidden:
        return f"the bad value of {f.name} is masked out of the loss, but backward multiplies it by 0, which gives NaN"
    if f.phase != "backward":
        return None
    for event in (f.event, f.blame.conversion):
        if has_masked_zeros(f, event):
            return f"the result of {f.name} is masked out, so its incoming gradient is 0, and its derivative there is infinite: 0 * inf is NaN"
    return None


@rule("singular_gradient")
def singular_gradient(f: Finding) -> str | None:
    if f.phase != "backward" or f.facts is None or f.facts.kind_in_fp64 == FINITE:
        return None
    return f"{f.name} is finite but its derivative is infinite at this point: {_operands(f)}"


# ---- forward arithmetic --------------------------------------------------------------------------------------------


@rule("exp_overflow")
def exp_overflow(f: Finding) -> str | None:
    if f.event is None or f.phase != "forward":
        return None
    if _op(f) in EXPONENTIALS or f.event.full_name.startswith("aten.pow.Scalar"):
        return f"{f.name} overflows: {_operands(f)}"
    return None


@rule("invalid_domain")
def outside_support(f: Finding) -> str | None:
    if f.phase != "forward" or not _is_log(f) or (frame := _of_distribution(f)) is None:
        return None
    if _LOG_OF_OWN.search(source_of(frame)):  # of its scale or rate, not of the value
        return None
    return f"the density is evaluated outside or on the edge of its support: {_operands(f)}"


@rule("log_of_nonpositive")
def log_of_nonpositive(f: Finding) -> str | None:
    if f.phase != "forward" or not _is_log(f):
        return None
    return f"{f.name} got {_operands(f)}"


@rule("division_by_zero")
def division_by_zero(f: Finding) -> str | None:
    if f.event is None or f.facts is None or f.phase != "forward":
        return None
    op = _op(f)
    if op in DIVISIONS and (_denominator_zeros(f) or f.event.kind_out == NAN):
        return f"{f.name} got {_operands(f)}"
    if op == "rsqrt" and (base := f.facts.at_bad.get("self")) is not None and base.zeros:
        return f"{f.name} of 0: {_operands(f)}"
    if op == "pow" and (base := f.facts.at_bad.get("self")) is not None and base.zeros and f.event.kind_out == INF:
        return f"a negative power of 0: {_operands(f)}"
    if op in NORMS and f.facts.kind_in_fp64 != FINITE:
        return f"{f.name} divides by a variance of 0: {_operands(f)}"
    return None


@rule("invalid_domain")
def invalid_domain(f: Finding) -> str | None:
    if f.facts is None or f.phase != "forward" or _op(f) not in RESTRICTED:
        return None
    if f.facts.kind_in_fp64 == FINITE and f.facts.peak_in_fp64 > 1e38:
        return None
    return f"{f.name} got values outside or on the edge of where it is defined: {_operands(f)}"


@rule("divergence")
def divergence(f: Finding) -> str | None:
    if f.facts is None or f.facts.kind_in_fp64 != FINITE:
        return None
    where = "backward, gradients grow" if f.phase == "backward" else "forward, values grow"
    return f"{f.name} overflows ({where} until they exceed the range of floats): {_operands(f)}"


# ---- helpers -------------------------------------------------------------------------------------------------------


def _op(f: Finding) -> str:
    return "" if f.event is None else f.event.op.rstrip("_")


def _is_log(f: Finding) -> bool:
    return _op(f) in LOGARITHMS


_LOG_OF_OWN = re.compile(r"\blog\([^)]*\bself\.|\bself\.\w+\.log\(")


def _of_distribution(f: Finding) -> Frame | None:
    """The line of torch.distributions that the op runs for."""
    if f.event is None:
        return None
    place = user_place(f.event.frames)
    for frame in f.event.frames:
        if "/torch/distributions/" in frame.code.co_filename.replace("\\", "/"):
            return frame
        if place is not None and frame.code.co_filename == place.file:
            return None
    return None


def _overflows(f: Finding) -> bool:
    return f.event is not None and f.event.kind_out == INF and f.facts is not None and f.facts.kind_in_fp64 == FINITE


def _picks(f: Finding) -> bool:
    """Does the op take single positions out, as a target does?"""
    picking = ("gather", "index", "take", "select", "nll_loss", "embedding")
    return f.event is not None and f.event.op.lstrip("_").startswith(picking)


def _is_lattice(f: Finding) -> bool:
    """-inf as the start of a recursion (full, pad), not as a mask over scores."""
    typed = {event.op.rstrip("_") for event in f.blame.path if event.literal}
    return bool(typed & {"full", "new_full", "full_like", "constant_pad_nd"}) and not typed & {"masked_fill", "where"}


def _denominator_zeros(f: Finding) -> int:
    """Zeros of the divisor where the result is bad, denormal ones included."""
    if f.facts is None or f.event is None:
        return 0
    names = {"addcdiv": ("tensor2",), "reciprocal": ("self",), "rsqrt": ("self",)}.get(_op(f), ("other",))
    if _op(f).startswith("_weight_norm"):
        return 1
    for name in names:
        if (at := f.facts.at_bad.get(name)) is not None and (at.zeros or at.smallest < TINY):
            return max(at.zeros, 1)
    other = f.facts.scalars.get("other")
    return int(abs(other) < TINY) if other is not None else 0


def _operands(f: Finding) -> str:
    if f.facts is None or not f.facts.inputs:
        return "its operands were not measured"
    return "; ".join(describe_operand(operand) for operand in f.facts.inputs[:4])
