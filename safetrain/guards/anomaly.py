"""Autograd's anomaly mode: names the backward operation that made a NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.options import option
from ..core.verdict import COMMIT, Action, Verdict
from ..core.view import StepView
from ..errors import UsageError
from .base import Guard

if TYPE_CHECKING:
    from torch import nn


@dataclass
class AnomalyConfig:
    mode: str = option("replay", choices=("replay", "always"))
    """`replay`: a step in trouble asks for its replay to run in anomaly mode; healthy steps pay nothing. `always`: the
    whole run is in anomaly mode, two to four times slower; use it for a fault that no replay reproduces. It refuses every
    NaN in a backward pass, also one that a later operation would have masked away."""


class Anomaly(Guard):
    """Anomaly mode sees NaN gradients only: no NaN of the forward pass, and no Inf."""

    Config = AnomalyConfig
    config: AnomalyConfig

    def attach(self, model: nn.Module) -> Callable[[], None] | None:
        if self.config.mode != "always":
            return None
        import torch

        before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(True, check_nan=True)

        def remove() -> None:
            torch.autograd.set_detect_anomaly(*before)

        return remove

    def explains(self, view: StepView) -> bool:
        if not self._raised(view):
            return False
        if view.loss_scale != 1.0:
            raise UsageError(
                f"guard anomaly, step {view.step}: {view.error}\nUnder the fp16 loss scaler (its scale is {view.loss_scale:g}) "
                "this may be a normal overflow, which anomaly mode cannot tell from a fault.\n"
                "To fix: set guards.anomaly.mode=replay, or loop.precision=bf16."
            ) from view.error
        return True

    def judge(self, view: StepView) -> Verdict:
        if self._raised(view):
            evidence = {"signal": "backward", "value": str(view.error)}
            return Verdict(Action.SKIP, reason=str(view.error), evidence=evidence)
        if self.config.mode == "replay" and view.in_trouble:
            return Verdict(detect_anomaly=True)
        return COMMIT

    def _raised(self, view: StepView) -> bool:
        """Anomaly mode raises `Function 'SqrtBackward0' returned nan values in its 0th output.`"""
        error = view.error
        return self.config.mode == "always" and isinstance(error, RuntimeError) and "returned nan values" in str(error)
