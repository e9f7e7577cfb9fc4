"""What guards see of a step on the host: of one that was measured, and of one that raised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ..core.view import StepView
from ..forensics import Step as Replayed
from ..forensics import investigation
from ..forensics.raised import is_of_the_program
from ..tensors import gradients
from .measurement import Measurement

if TYPE_CHECKING:
    from .step import Step


def of_measurement(step: Step, measurement: Measurement) -> StepView:
    fields = measurement.read()
    norm_overflow = False
    if math.isinf(fields["grad_norm"]):
        true_norm = gradients.overflow_free_norm(gradients.collect(step.parameters))
        if norm_overflow := true_norm is not None:
            fields["grad_norm"] = true_norm
    loss, norm = map(math.isfinite, (fields["loss"], fields["grad_norm"]))
    scaler_overflow = step.precision.has_scaler and loss and not norm
    return StepView(
        step=step.index,
        epoch=step.history.epoch,
        lrs=step.schedule.lrs_given(fields.pop("rates", {})),
        limits=measurement.limits,
        norm_overflow=norm_overflow,
        scaler_overflow=scaler_overflow,
        bad_state=step.audit.bad_state_before_step,
        **step.history.view_fields(scaler_overflow),
        **fields,
    )


def of_error(step: Step, error: Exception, window: Sequence[Any]) -> StepView:
    return StepView(
        step=step.index,
        epoch=step.history.epoch,
        loss=math.nan,
        grad_norm=math.nan,
        lrs=step.schedule.lrs,
        loss_scale=step.precision.host_loss_scale(),
        bad_state=step.audit.bad_state_before_step,
        window=lambda: window,
        error=error,
        **step.history.view_fields(),
    )


def is_raised_by_numbers(step: Step, view: StepView) -> bool:
    """By a replay, for exceptions whose message does not say it."""
    if is_of_the_program(cast(BaseException, view.error)) or not step.exchange.may_replay_now(step.model):
        return False
    with step.exchange.alone(step), step.patches.uncounted():
        replayed = Replayed(
            step.called,
            step.training_step,
            view.window(),
            step.optimizer,
            step.precision.name,
            view.loss_scale,
            step.transaction.random_state,
        )
        return investigation.is_raised_by_numbers(replayed)
