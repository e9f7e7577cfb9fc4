"""Notices a network that no longer learns although every number is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..history import Recent, Smooth
from ..options import option
from ..verdict import COMMIT, Action, Decision, Verdict
from ..view import DeviceStep, StepView
from .base import Guard

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass
class StallConfig:
    dead_steps: int = option(20, ge=1)
    """Steps in a row with a gradient of (nearly) zero and a loss that is not, after which the network is dead."""
    vanished: float = option(1e-9, ge=0.0)
    """A gradient norm below this share of the recent ones has vanished."""
    frozen_steps: int = option(40, ge=2)
    """Steps in a row with the very same loss, far above the best one, after which the network is frozen."""
    outputs_every: int | None = option(20, ge=1)
    """Look at the model's output every so many steps: three times in a row the same for every sample of the batch is
    collapse. null: never."""
    no_progress_steps: int = option(60, ge=5)
    """Steps after which a loss that was never below its start, and is far above it, means that training never began:
    it starts again from the first snapshot, at a tenth of the learning rate."""
    far_above: float = option(1.5, gt=1.0)
    """What counts as far above: this many times the starting (or best) loss."""


COUNTS = ("num_seen", "num_dead", "num_frozen", "num_constant")


class Stall(Guard):
    Config = StallConfig
    config: StallConfig

    def __init__(self, config: StallConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.num_seen = self.num_dead = self.num_frozen = self.num_constant = 0
        self._output: Tensor | None = None
        self._is_watching = False
        self.norms = Recent(50)
        self.start, self.best, self.last = math.inf, math.inf, math.inf
        self.smooth = Smooth(0.9)

    def attach(self, model: nn.Module) -> Callable[[], None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._is_watching:
                self._output = next((leaf.detach() for leaf in leaves(output) if _has_samples(leaf)), None)

        from ..batch import leaves

        return model.register_forward_hook(keep).remove

    def begin(self, step: int, num_refused: int) -> None:
        every = self.config.outputs_every
        self._is_watching, self._output = every is not None and step % every == every - 1, None

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        output, self._output = self._output, None
        return {} if output is None else {"output_spread": (output.amax(0) - output.amin(0)).amax().float()}

    def judge(self, view: StepView) -> Verdict:
        evidence = {"signal": "grad_norm", "value": view.grad_norm}
        if self.num_dead >= self.config.dead_steps:
            reason = f"the gradient has been zero for {self.num_dead} steps at a loss of {self.last:.4g}: the network is dead"
            return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence)
        evidence = {"signal": "loss", "value": self.last}
        if self.num_frozen >= self.config.frozen_steps:
            reason = (
                f"the loss has been exactly {self.last:.6g} for {self.num_frozen} steps, its best was {self.best:.4g}"
            )
            return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence)
        if self.num_constant >= 3:
            evidence = {"signal": "output_spread", "value": 0.0}
            reason = f"the model gives the same output for every sample of a batch, {self.num_constant} times in a row"
            return Verdict(Action.ROLLBACK, reason=reason, evidence=evidence)
        if self._never_began():
            reason = f"after {self.num_seen} steps the loss ({self.smooth.mean:.4g}) was never below its start ({self.start:.4g})"
            return Verdict(Action.ROLLBACK, reason=reason, evidence={**evidence, "restart": True})
        return COMMIT

    def _never_began(self) -> bool:
        if self.num_seen != self.config.no_progress_steps:
            return False
        return self.best >= self.start and self.smooth.mean > self._far_above(self.start)

    def _has_vanished(self, norm: float) -> bool:
        if norm == 0.0:
            return True
        limit = self.config.vanished
        return bool(self.norms) and norm <= limit * self.norms.largest and norm <= limit * self.norms.center

    def _far_above(self, loss: float) -> float:
        return loss + (self.config.far_above - 1.0) * abs(loss)

    def learn(self, view: StepView, decision: Decision) -> None:
        loss, norm = view.loss, view.grad_norm
        if not math.isfinite(loss):
            return
        self.num_seen += 1
        if self.num_seen == 1:
            self.start = loss
        elif self.smooth.add(loss) < self.best:
            self.best = self.smooth.mean
        if (spread := view.signals.get(f"{self.name}.output_spread")) is not None:
            self.num_constant = self.num_constant + 1 if spread == 0.0 else 0
        is_dead = self._has_vanished(norm) and loss != 0.0
        self.num_dead = self.num_dead + 1 if is_dead else 0
        if not is_dead:
            self.norms.add(norm)
        is_frozen = loss == self.last and loss > self._far_above(self.best)
        self.num_frozen = self.num_frozen + 1 if is_frozen else 0
        self.last = loss

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in COUNTS}
        numbers = {"start": self.start, "best": self.best, "last": self.last}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**counts, **finite, "smooth": [self.smooth.mean, self.smooth.count], "norms": list(self.norms.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, state[name])
        self.norms = Recent(50, state["norms"])
        for name in ("start", "best", "last"):
            setattr(self, name, math.inf if state[name] is None else state[name])
        self.smooth = Smooth(0.9, *state["smooth"])


def _has_samples(leaf: Any) -> bool:
    """A tensor of floating-point numbers with more than one entry in its first dimension."""
    return hasattr(leaf, "is_floating_point") and leaf.is_floating_point() and leaf.dim() > 0 and len(leaf) > 1
