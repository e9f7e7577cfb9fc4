"""Check of the evaluation: one batch of it, before the first step."""

from __future__ import annotations

import traceback

from ..outcome import Outcome, failed, passed, skipped
from ..registry import preflight_check
from ..subject import Subject


@preflight_check(
    looks_at="one batch of each evaluation set, through `evaluation_step`",
    fails="it raises, the set is empty, or `loop.monitor` is none of its metrics",
    fix="correct `evaluation_step`, the evaluation data or `loop.monitor`",
)
def evaluation(subject: Subject) -> Outcome:
    tried = subject.trainer.evaluation
    if not tried.streams:
        return skipped("there is no evaluation data")
    with subject.clean():
        try:
            metrics = tried.try_out()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).splitlines()
            fix = next((line.removeprefix("To fix: ") for line in said if line.startswith("To fix: ")), "")
            return failed(
                f"the evaluation raises {type(error).__name__}: {said[0] if said else ''} ({place.filename}:{place.lineno})",
                fix or "correct evaluation_step, or the data that it is given",
            )
    if not metrics:
        return skipped("the evaluation data can be read only once, or keeps its own position")
    return passed(f"one batch gives {', '.join(metrics)}")
