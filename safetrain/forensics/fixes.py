"""What to change, at that line: one sentence per cause, naming the building block of `safetrain.safe` to use there."""

from __future__ import annotations

from ..core.incident import Cause, Remedy
from .finding import Finding

# By the name of the op at that line.
_SAFE = {
    "log": "safe.log(x)", "log2": "safe.log(x) / math.log(2)", "log10": "safe.log(x) / math.log(10)", "log1p": "safe.log(1 + x)", "xlogy": "safe.log(y)",
    "div": "safe.div(x, y)", "reciprocal": "safe.div(1, x)", "sqrt": "safe.sqrt(x)", "rsqrt": "1 / safe.sqrt(x)",
    "pow": "safe.pow(x, p)", "exp": "safe.exp(x)", "exp2": "safe.exp(x)", "expm1": "safe.exp(x)",
    "softmax": "safe.softmax(x, mask=mask)", "log_softmax": "safe.log_softmax(x, mask=mask)", "norm": "safe.norm(x)",
    "binary_cross_entropy": "safe.bce(logits, y)", "mean": "safe.masked_mean(x, mask)", "nanmean": "safe.masked_mean(x, mask)",
    "std": "safe.std(x)", "var": "safe.std(x)", "acos": "safe.acos(x)", "asin": "safe.asin(x)", "atanh": "safe.atanh(x)",
    "arccos": "safe.acos(x)", "arcsin": "safe.asin(x)", "arctanh": "safe.atanh(x)", "multi_head_attention_forward": "safe.softmax(x, mask=mask)",
    "normalize": "safe.normalize(x)", "cosine_similarity": "safe.cosine_similarity(a, b)",
}  # fmt: skip

ADVICE = {
    "division_by_zero": "keep the divisor away from 0, or leave out what has nothing to divide by",
    "log_of_nonpositive": "keep the argument above 0, or stay in log space (log_softmax, logsigmoid, logsumexp)",
    "invalid_domain": "clamp the argument strictly inside the domain of the function",
    "singular_gradient": "the derivative is infinite there: add eps inside the function, or use a form with a finite derivative",
    "masked_branch_gradient": "make the *input* safe before the op (x = where(ok, x, 1)), not only its output: masking afterwards leaves 0 * inf in backward",
    "neg_inf_mask": "use a large finite number instead of -inf, or give rows without any valid position something to attend to",
    "exp_overflow": "bound the exponent, subtract the maximum first, or use logsumexp / softplus",
    "fp16_overflow": "keep this module in float32 (guards.islands) or use bf16; for gradients, use a dynamic loss scale",
    "fp16_underflow": "use an eps that half precision can hold (1e-5 or more), or compute this in float32",
    "empty_reduction": "guard the count: return 0 when there is nothing to reduce, or use correction=0 for one value",
    "degenerate_decomposition": "add a small graded ridge to the matrix, or skip matrices with repeated singular values",
    "infeasible_target": "leave out targets that cannot be reached (zero_infinity=True for CTC)",
    "bad_input_data": "clean or drop these samples before they reach the model",
    "corrupt_parameter": "initialise it, or reload it from a checkpoint that holds finite values",
    "divergence": "lower the learning rate, clip the gradient norm after backward(), or normalise the values",
    "optimizer_numerics": "guard the division in the optimizer (a larger eps), and check the learning rate schedule",
    "custom_backward_bug": "fix the backward of this autograd.Function: initialise what it returns, and guard its divisions",
    "unknown": "no rule explains this; look at the operands and at the remedies that worked",
}  # fmt: skip

_SHOWS_IT = {
    "fp16_overflow": ("fp32_island", "fp32"),
    "fp16_underflow": ("fp32_island", "fp32"),
    "optimizer_numerics": ("optimizer_eps", "learning_rate"),
    "divergence": ("clip",),
}
"""Remedies that are what the advice says, so that its proof is of that and not of something else."""


def suggest(finding: Finding, cause: Cause, remedies: list[Remedy]) -> str:
    advice = ADVICE[cause.label]
    where = f" at {finding.place.file.rpartition('/')[2]}:{finding.place.line}" if finding.place else ""
    safe = _SAFE.get(finding.name or "")
    text = f"{advice}{where}"
    if safe is not None and finding.phase in ("forward", "backward") and finding.place is not None:
        text += f": use {safe.replace('safe.', 'safetrain.safe.')} there"
    if zero := finding.zero_parameters:
        its = "its initialisation" if len(zero) == 1 else "their initialisation"
        text += f". {' and '.join(zero[:3])} {'is' if len(zero) == 1 else 'are'} 0 throughout: change {its}"
    shows = _SHOWS_IT.get(cause.label, ())
    worked = sorted((r for r in remedies if r.finite), key=lambda r: (r.name not in shows, r.name != "safe_op"))
    return f"{text}. Verified: {worked[0].detail}, the step is finite." if worked else f"{text}."
