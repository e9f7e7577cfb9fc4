"""What to change, at that line: one sentence per cause, naming the building block of `safetrain.safe` to use there."""

from __future__ import annotations

from ..core.causes import CAUSES, SAFE_CALLS
from ..core.incident import Cause, Remedy
from .finding import Finding
from .ownership import library_of

# By the name of the op at that line.
_SAFE = {name: call.format("x") for name, call in SAFE_CALLS.items()} | {
    "xlogy": "safe.log(y)", "div": "safe.div(x, y)", "pow": "safe.pow(x, p)", "exp": "safe.exp(x)", "exp2": "safe.exp(x)", "expm1": "safe.exp(x)",
    "softmax": "safe.softmax(x, mask=mask)", "log_softmax": "safe.log_softmax(x, mask=mask)", "norm": "safe.norm(x)",
    "binary_cross_entropy": "safe.bce(logits, y)", "mean": "safe.masked_mean(x, mask)", "nanmean": "safe.masked_mean(x, mask)",
    "std": "safe.std(x)", "var": "safe.std(x)", "multi_head_attention_forward": "safe.softmax(x, mask=mask)",
    "normalize": "safe.normalize(x)", "cosine_similarity": "safe.cosine_similarity(a, b)",
}  # fmt: skip


def suggest(finding: Finding, cause: Cause, remedies: list[Remedy]) -> str:
    known = CAUSES[cause.label]
    where = f" at {finding.place.file.rpartition('/')[2]}:{finding.place.line}" if finding.place else ""
    safe = _SAFE.get(finding.name or "")
    is_of_call = finding.phase in ("forward", "backward") and cause.label not in _OF_TRAINING
    if cause.label == "empty_reduction" and finding.name == "batch_norm":
        text = "give BatchNorm 2 or more samples in each batch: data.drop_last=true (drop_last=True of a DataLoader) leaves out a last batch of one"
    elif finding.caller is not None or (finding.call_place is not None and is_of_call):
        text = _in_library(finding, cause.label, remedies)
        not_advised = ("safe_op", "fused_form", "zero_bad_values")
        remedies = [remedy for remedy in remedies if remedy.name not in not_advised]
    elif finding.fused_form is not None:
        form = f"by torch.nn.functional {finding.fused_form} of what is under it"
        text = f"{known.advice}{where}: compute it in one piece, {form}"
    elif safe is not None and finding.phase in ("forward", "backward") and finding.place is not None:
        text = f"{known.advice}{where}: use {safe.replace('safe.', 'safetrain.safe.')} there"
    else:
        text = f"{known.advice}{where}"
    leaf = finding.blame.leaf
    if finding.phase == "params" and leaf is not None and leaf.kind == "attribute":
        text = f"{leaf.name} was left non-finite by an earlier step, not by this batch: reset it when a step is skipped, or before each sequence"
    if zero := finding.zero_parameters:
        its = "its initialisation" if len(zero) == 1 else "their initialisation"
        text += f". {' and '.join(zero[:3])} {'is' if len(zero) == 1 else 'are'} 0 throughout: change {its}"
    worked = sorted(
        (r for r in remedies if r.finite),
        key=lambda r: (
            r.name not in known.shown_by,
            r.name not in ("changed_line", "library_option", "parameter_in_range", "fused_form", "safe_op"),
        ),
    )
    if not worked:
        return f"{text}."
    what = "with that line" if worked[0].name == "changed_line" else worked[0].detail
    other = next((r.detail for r in worked[1:] if r.name == "drop_samples" and finding.call_place is not None), "")
    return f"{text}. Verified: {what}, the step is finite{f' (also {other})' if other else ''}."


# Of an operation inside a library, whose lines cannot be changed.
_BEFORE_THE_CALL = {
    "empty_reduction": "do not make this call when there is nothing to reduce: leave out such batches, or return 0 instead",
    "singular_gradient": "keep the argument away from where the derivative is infinite: add a small eps to it",
    "masked_branch_gradient": "make the argument safe (x = where(ok, x, 1)): masking the result leaves 0 * inf in backward",
    "degenerate_decomposition": "add a small graded ridge to the matrix, or leave out degenerate samples",
    "exp_overflow": "bound the argument",
    "log_of_nonpositive": "keep the argument above 0",
    "invalid_domain": "clamp the argument strictly inside the domain of the function",
}
_OF_TRAINING = {"divergence", "corrupt_parameter", "custom_backward_bug", "fp16_overflow", "fp16_underflow"}


def _in_library(finding: Finding, label: str, remedies: list[Remedy]) -> str:
    """What to change for a person who cannot edit the library: the own line, the argument, an option of the library."""
    caller = finding.call_place
    assert caller is not None
    library = (library_of(finding.place.file) if finding.place is not None else None) or "torch"
    line = f"{caller.file.replace(chr(92), '/').rpartition('/')[2]}:{caller.line}"
    advice = CAUSES[label].advice
    if finding.phase in ("params", "optimizer", "data") or label in _OF_TRAINING:
        return f"{advice}; {library} is called at {line}"
    text = f"{_BEFORE_THE_CALL.get(label, advice)}, before your call into {library} at {line}"
    if finding.carried is not None:
        text += f": the bad value comes with {finding.carried.text}"
    elif finding.source:
        text = f"the bad value is not in what you pass at {line}, it comes from {finding.source}: change that"
    if finding.changed_line:
        text += f". Write `{finding.changed_line}` there"
    verified = [remedy.name for remedy in remedies if remedy.finite]
    if finding.options and "library_option" in verified:
        option = finding.options[0]
        text += f"{', or' if finding.changed_line else '. Make'} {option.text.format(1e-6)}"
    return text
