"""Check that searches for data and weights that would make a step non-finite."""

from __future__ import annotations

from ...forensics import Effort, Step, diagnose
from ...forensics.replay import fresh
from ..outcome import Outcome, Unavailable, passed, skipped, warned
from ..registry import preflight_check
from ..singular import Search
from ..subject import Subject
from .steps import _short

SHARE = 0.2
"""Of the budget."""


@preflight_check(
    looks_at="operations with a singular point (log, sqrt, a division, exp, acos …): inputs and weights are pushed towards it",
    warns="the step becomes non-finite with inputs within the range of the data, and weights that training can reach",
    fix="the form of the operation that was tried there: log_softmax, softplus, safetrain.safe",
)
def singular_points(subject: Subject) -> Outcome:
    """What is reported was reproduced: the step was investigated with the inputs and weights found."""
    read = subject.healthy[0]
    trainer = subject.trainer
    found: list[tuple[str, str, str]] = []
    with subject.clean():
        search = Search(
            subject.model,
            lambda batch: subject.forward(batch, autocast=False),
            fresh(read.batch),
            subject.budget.deadline(SHARE),
        )
        try:
            for reached in search.run():
                step = Step(subject.model, trainer.training_step, [reached.batch])
                diagnosis = diagnose(step, Effort(max_replays=12))
                if diagnosis.healthy or diagnosis.origin.phase not in ("forward", "backward"):
                    continue
                origin = diagnosis.origin
                how = "inputs within the range of the data"
                if reached.weight_change > 0:
                    how = f"weights that have moved by {reached.weight_change:.1f} times their size"
                where = f"{_short(origin.file)}:{origin.line}" if origin.file else origin.module or ""
                text = f"{origin.name or origin.op} at {where} `{(origin.code or '').strip()}` fails with {how}: {diagnosis.cause.label}"
                if all(where != known for known, _, _ in found):
                    found.append((where, text, diagnosis.fix))
        except Exception as error:  # the step cannot run with free inputs
            raise Unavailable(f"the step cannot be searched: {type(error).__name__}: {error}") from error
    if not search.num_risks:
        return skipped("the step has no operation with a singular point in your own code")
    if not found:
        return passed(f"{search.num_risks} operations with a singular point, none could be driven there")
    return warned(
        "; ".join(text for _, text, _ in found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""),
        found[0][2],
        found=[{"place": where, "text": text, "fix": fix} for where, text, fix in found],
        num_risks=search.num_risks,
    )
