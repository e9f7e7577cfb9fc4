"""What a remedy may use: the replayer, the finding, and a budget."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..core.incident import Remedy
from ..tensors.nest import tensors_in
from .finding import Finding
from .replay import Replayer, Result
from .samples import Samples
from .substitutes import Patch
from .update import update_is_finite


class Trials:
    def __init__(self, replayer: Replayer, finding: Finding, samples: Samples, max_replays: int) -> None:
        self.replayer = replayer
        self.finding = finding
        self.samples = samples
        self._last = replayer.num_replays + max_replays
        self.tried: list[Remedy] = []
        self.patch: Patch | None = None
        """What was put in for the safe variant that worked."""
        self.island: str | None = None
        """The module that had to stay in fp32."""

    @property
    def models(self) -> list[nn.Module]:
        return [self.replayer.model, *self.replayer.sandbox.loss_modules]

    @property
    def has_success(self) -> bool:
        return any(remedy.finite for remedy in self.tried)

    @property
    def has_budget(self) -> bool:
        return self.replayer.num_replays < self._last and self.replayer.has_time()

    def replay(self, name: str, detail: str, *changes: AbstractContextManager[Any], **options: Any) -> Remedy:
        """The step with these changes, and its update if that is where it went wrong."""
        result = self.replayer.plain(changes=changes, **options)
        return self.judged(name, detail, result)

    def judged(self, name: str, detail: str, result: Result) -> Remedy:
        if result.error is not None:
            error = str(result.error).strip().splitlines() or [type(result.error).__name__]
            return Remedy(name, False, None, f"{detail}: not applicable ({error[0][:120]})")
        finite = result.finite
        if finite and not self._is_sensible(result.loss_value):
            return Remedy(
                name, False, result.loss_value, f"{detail}: finite, but the loss is not what training can use"
            )
        if finite and self.finding.phase == "optimizer":
            finite = self._has_gradients() and update_is_finite(self.replayer)
        return Remedy(name, finite, result.loss_value, detail)

    def _is_sensible(self, loss: float | None) -> bool:
        """Near the loss of the good samples, where it is known; else not out of all proportion to the numbers of the batch."""
        without = self.samples.without
        good = without.loss_value if without is not None and without.finite else None
        if loss is None or self.finding.cause_label == "divergence":
            return True
        if good is not None:
            return abs(loss) <= 1e3 * (abs(good) + 1)
        return abs(loss) <= 1e6 * (1 + self._largest**2)

    @cached_property
    def _largest(self) -> float:
        tensors = [t for t in tensors_in(self.replayer.step.window) if t.is_floating_point() and t.numel()]
        finite = [torch.nan_to_num(t.detach(), posinf=0.0, neginf=0.0).abs().max() for t in tensors]
        return max((float(each) for each in finite), default=0.0)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose update went wrong; None if that is not where it began."""
        return self.replayer.step.optimizer if self.finding.phase == "optimizer" else None

    def update(self, name: str, detail: str, change: AbstractContextManager[Any]) -> Remedy:
        """The step as it was, and its update with this change. What the change does to the optimizer is undone with the update."""
        result = self.replayer.plain()
        finite = result.finite and update_is_finite(self.replayer, [change])
        return Remedy(name, finite, result.loss_value, detail)

    def _has_gradients(self) -> bool:
        """A replay in another precision leaves none, and an update without gradients shows nothing."""
        optimizer = self.replayer.step.optimizer
        return optimizer is not None and any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
