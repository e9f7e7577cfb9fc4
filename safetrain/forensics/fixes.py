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
    if (caller := finding.caller) is not None and finding.place is not None:  # a library, which is not to be edited
        library = library_of(finding.place.file) or "the library"
        line = f"{caller.file.replace(chr(92), '/').rpartition('/')[2]}:{caller.line}"
        text = f"{known.advice}, before your call into {library} at {line}; safetrain fix tries changes of that line"
        not_advised = ("safe_op", "fused_form", "zero_bad_values")  # inside the library
        remedies = [remedy for remedy in remedies if remedy.name not in not_advised]
    elif finding.fused_form is not None:
        form = f"by torch.nn.functional {finding.fused_form} of what is under it"
        text = f"{known.advice}{where}: compute it in one piece, {form}"
    elif safe is not None and finding.phase in ("forward", "backward") and finding.place is not None:
        text = f"{known.advice}{where}: use {safe.replace('safe.', 'safetrain.safe.')} there"
    else:
        text = f"{known.advice}{where}"
    if zero := finding.zero_parameters:
        its = "its initialisation" if len(zero) == 1 else "their initialisation"
        text += f". {' and '.join(zero[:3])} {'is' if len(zero) == 1 else 'are'} 0 throughout: change {its}"
    worked = sorted(
        (r for r in remedies if r.finite),
        key=lambda r: (r.name not in known.shown_by, r.name not in ("fused_form", "safe_op")),
    )
    return f"{text}. Verified: {worked[0].detail}, the step is finite." if worked else f"{text}."
