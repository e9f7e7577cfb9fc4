"""Check of the initial loss against that of a model that has learned nothing yet."""

from __future__ import annotations

import math

from ...core.numbers import amount
from ...tensors.devices import wide
from ..observer import LossCall
from ..outcome import Outcome, Problems, passed, skipped, worst
from ..registry import preflight_check
from ..subject import Subject


@preflight_check(
    looks_at="the first loss against that of a model that has learned nothing: ln C, ln 2, or predicting 0",
    fails="5 times that (squared error: 100 times), or 1,000 times its own mean",
    warns="1.5 times, less than half, or 20 times its own mean",
    fix="small weights in the last layer, standardised targets, `reduction='mean'`",
)
def initial_loss(subject: Subject) -> Outcome:
    seen = subject.steps
    loss = sum(seen.losses) / len(seen.losses)
    first = seen.losses[0]
    known = [(call, usual) for call in subject.loss_calls if call.mean is not None and (usual := _expected(call))]
    if not known:
        return skipped(f"the loss is {amount(loss)}; only torch's own loss functions have an expected initial value")
    call, (expected, why) = known[0]
    assert call.mean is not None
    ratio = call.mean / expected if expected else math.nan
    numbers = {"loss": loss, "part": call.mean, "expected": expected, "kind": call.kind}
    problems = Problems()
    is_squared = call.kind == "mse_loss"
    if ratio > (10 if is_squared else 1.5) and call.mean > expected + 0.5:
        fix = (
            "standardise the targets, and start the last layer with small weights"
            if is_squared
            else "scale the weights of the last layer down, so that its outputs start near 0"
        )
        problems.add(
            ratio > (1000 if is_squared else 5),
            f"{call.kind} starts at {amount(call.mean)}, {amount(ratio)} times the {amount(expected)} of {why}",
            fix,
            **numbers,
        )
    elif not is_squared and ratio < 0.5:
        problems.warn(
            f"{call.kind} starts at {amount(call.mean)}, far below the {amount(expected)} of {why}",
            "fine for trained weights; otherwise look for the label among the inputs",
            **numbers,
        )
    if len({c.kind for c, _ in known}) == 1 and len(subject.loss_calls) <= 4 * len(seen.losses):
        # Summing over the values of each sample is common; summing over samples, or a large factor, is not.
        per_sample = 1 if call.num_classes else math.prod(call.target_shape[1:])
        share = abs(first) / abs(call.mean) / per_sample if call.mean else math.nan
        if share > 20:
            times = f"{amount(share)} times its mean over samples"
            problems.add(
                share > 1000,
                f"the loss is {amount(first)}, {times} ({amount(call.mean)})",
                "average over samples and values (reduction='mean') and leave out large factors: the learning rate depends on them",
                **numbers,
            )
    return worst(problems, passed(f"{call.kind} starts at {amount(call.mean)}, {why} is {amount(expected)}", **numbers))


def _expected(call: LossCall) -> tuple[float, str] | None:
    """The loss of a model that has learned nothing yet, and the name of that value."""
    if call.arguments.get("has_weight"):
        return None
    if call.kind in ("cross_entropy", "nll_loss") and call.num_classes > 1:
        return math.log(call.num_classes), f"ln {call.num_classes}"
    if call.kind in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
        return math.log(2), "ln 2"
    if call.kind == "mse_loss" and call.target.numel() > 1:
        square = float(wide(call.target).square().mean())
        return (square, "predicting 0") if square > 0 else None
    return None
