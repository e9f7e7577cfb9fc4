"""What can be held at its current value (a learning rate, a few parameters), so that a step that is refused repeatedly
becomes finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.copies import Copy
from ..checkpoint.state import TrainState
from ..core.numbers import amount, listed
from ..step.held import is_bad, is_zero
from ..step.step import Step
from ..tensors.sharded import is_sharded
from .refused_step import RefusedStep

IN_A_ROW = 3
"""Steps that are refused before a part of the model is held: a batch may be at fault in one."""
SHARE = 0.1
"""Of the trained numbers that may be held: training without most of a model is another training."""
SAFE_EPS = 1e-4
"""In half precision: squares of smaller gradients are zero there, and an update by what is left is at most a few times the rate."""


def can_hold(case: RefusedStep) -> bool:
    if case.is_late or not case.is_step:
        return False
    if case.is_fault_of_schedule or "update" in case.decision.verdicts:
        return True
    return case.is_non_finite and math.isfinite(case.view.loss) and case.view.consecutive_refusals + 1 >= IN_A_ROW


def hold(step: Step, case: RefusedStep, last_rates: Sequence[float]) -> str | None:
    """Hold what makes this step non-finite, from now on; what that is in words, or None if nothing can be."""
    if case.is_fault_of_schedule:
        return _rates(step, case, last_rates)
    if is_sharded(step.model) or step.precision.has_scaler:
        return None
    if "update" in case.decision.verdicts:
        return _eps(step) or _zero_gradients(step, case)
    return _buffers(step, case) if case.incident.trigger.signal == "buffers" else _gradients(step, case)


def _rates(step: Step, case: RefusedStep, last_rates: Sequence[float]) -> str | None:
    groups = step.optimizer.param_groups
    # Before the first committed step there is no last good one, but that which the optimizer was made with.
    made_with = [group.get("initial_lr", step.optimizer.defaults.get("lr")) for group in groups]
    rates = [float(rate or 0.0) for rate in (last_rates or made_with)]
    if step.held.rates or len(rates) != len(groups) or not all(map(math.isfinite, rates)):
        return None
    step.held.rates = rates
    said = listed([amount(rate) for rate in dict.fromkeys(rates)])
    return f"where the schedule gives no finite learning rate, it stays at the last good one, {said}"


def _eps(step: Step) -> str | None:
    """An eps that is zero in the type of the parameters divides by zero wherever a gradient is small."""
    found = []
    for index, group in enumerate(step.optimizer.param_groups):
        eps = group.get("eps")
        if isinstance(eps, float) and any(float(torch.tensor(eps, dtype=p.dtype)) == 0.0 for p in group["params"]):
            found.append(eps)
            step.held.eps[index] = SAFE_EPS
    if not found:
        return None
    return (
        f"eps={found[0]:g} of {type(step.optimizer).__name__} is zero in half precision: it is {SAFE_EPS:g} from now on"
    )


def _agreed(step: Step, names: list[str]) -> list[str]:
    """Of all ranks, the same on each; nothing if they differ."""
    found = step.exchange.gather(names)
    return names if all(each == names for each in found) else []


def _zero_gradients(step: Step, case: RefusedStep) -> str | None:
    """Some optimizers divide by the norm of each gradient. Where it is zero, nothing is learned from it either."""
    parameters = dict(step.model.named_parameters())
    step.transaction.rewind()
    measurement = step.attempt(case.window)
    view = step.view(measurement)
    zero = [name for name, p in parameters.items() if p.grad is not None and is_zero(p.grad)]
    before = Copy().take(TrainState.gather(step))
    step.update(measurement, view, case.decision.lr_scale)
    bad = step.bad_state()
    before.restore_training(step)
    step.transaction.expect_weights()
    step.undo(case.view.loss_scale)
    ruined = [name for name in parameters if any(label.split(" ")[-1] == name for label in bad)]
    names = _agreed(step, [name for name in ruined if name in zero and name not in step.held.gradients])
    if not names or len(names) < len(ruined):
        return None
    step.held.gradients |= dict.fromkeys(names, True)
    return f"{_named(names)}: no update while the gradient is zero, by which {type(step.optimizer).__name__} divides"


def _gradients(step: Step, case: RefusedStep) -> str | None:
    step.transaction.rewind()
    step.attempt(case.window)
    trained = {name: p for name, p in step.model.named_parameters() if p.grad is not None}
    bad = [name for name, p in trained.items() if _is_bad_gradient(p)]
    num_bad, num_all = (sum(p.numel() for p in some) for some in ([trained[name] for name in bad], trained.values()))
    step.undo(case.view.loss_scale)
    names = _agreed(step, bad)
    if not names or num_bad > SHARE * num_all or any(name in step.held.gradients for name in names):
        return None
    step.held.gradients |= dict.fromkeys(names, False)
    return (
        f"{_named(names)}: no update while the gradient is not finite, as in {case.view.consecutive_refusals + 1} steps in a row; "
        "all other gradients are finite"
    )


def _is_bad_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and is_bad(parameter.grad)


def _buffers(step: Step, case: RefusedStep) -> str | None:
    step.transaction.rewind()
    step.attempt(case.window)
    bad = [
        name for name, buffer in step.transaction.buffers_now() if is_bad(buffer) and bool(torch.isfinite(buffer).any())
    ]
    step.undo(case.view.loss_scale)
    names = _agreed(step, [name for name in bad if name not in step.held.buffers])
    if not names:
        return None
    step.held.buffers += names
    return f"{_named(names)}: entries that would become non-finite keep their values"


def _named(names: Sequence[Any]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
