"""Detects a network that no longer learns although every number is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.history import Recent
from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Doubt, Finding, Verdict
from ..core.view import DeviceStep, StepView
from .base import Guard
from .statistics import Beginning, raised

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
    """Look at the model's output every N steps: the same output for every sample of the batch, three times in a row, is
    collapse. null: never."""
    no_progress_steps: int = option(60, ge=5)
    """Steps after which a loss that was never below its start, and is far above it, means that training never began:
    it starts again from the first snapshot, at a tenth of the learning rate."""
    early_steps: int | None = option(8, ge=2)
    """If after this many steps the mean loss is `early_rise` above its start and the weights have grown by half, the step is tried
    with the weights of the start: if they are better at it, training starts again at a tenth of the learning rate. A rate whose updates
    are as large as the weights is tried against a lower one, one step before, and again after four times as many. null: never."""
    early_rise: float = option(0.25, ge=0.0, needs=("early_steps",))
    """See `early_steps`."""
    far_above: float = option(1.5, gt=1.0)
    """What counts as far above: this many times the starting (or best) loss."""


COUNTS = ("num_dead", "num_frozen", "num_constant", "patience")


class Stall(Guard):
    Config = StallConfig
    config: StallConfig
    measures_backward = False
    over_ranks = "max"

    def __init__(self, config: StallConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.num_dead = self.num_frozen = self.num_constant = 0
        self.patience = 1
        """How many times as long as the options say it takes: twice as long after each look that found nothing wrong."""
        self.norms = Recent(50)
        self.last = math.inf
        self.beginning = Beginning()
        self._output: Tensor | None = None
        self._model: nn.Module | None = None
        self._remove_hook: Callable[[], None] | None = None
        """Set only while a step is watched: a module with a hook is slower to call."""
        self._weights: list[Tensor] = []

    def attach(self, model: nn.Module) -> Callable[[], None]:
        from ..precision.compiled import called_for

        self._weights = [p.detach() for p in model.parameters() if p.requires_grad and p.is_floating_point()]
        self._model = called_for(model)
        return self._detach

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        from ..tensors.nest import leaves

        self._output = next((leaf.detach() for leaf in leaves(output) if _has_samples(leaf)), None)

    def _unhook(self) -> None:
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None

    def _detach(self) -> None:
        self._unhook()
        self._model = None

    def begin(self, step: int, num_refused: int) -> None:
        if self._remove_hook is not None:  # a step that raised has left it on
            self._unhook()
        every, self._output = self.config.outputs_every, None
        if every is not None and step % every == every - 1 and self._model is not None:
            self._remove_hook = self._model.register_forward_hook(self._keep).remove

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        output, self._output = self._output, None
        if self._remove_hook is not None:
            self._unhook()
        signals = {} if output is None else {"output_spread": (output.amax(0) - output.amin(0)).amax().float()}
        if self._weights and self.beginning.num_seen in (0, self.config.early_steps):
            from ..tensors.gradients import global_norm, numbers_of

            signals["weight_size"] = global_norm([numbers_of(weight) for weight in self._weights]).to(step.loss.device)
        return signals

    def judge(self, view: StepView) -> Verdict:
        if self.num_dead >= self.config.dead_steps * self.patience:
            evidence: dict[str, Any] = {"signal": "grad_norm", "value": view.grad_norm}
            reason = f"the gradient has been zero for {self.num_dead} steps at a loss of {self.last:.4g}: the network is dead"
            return _dead(reason, evidence)
        if self.num_frozen >= self.config.frozen_steps * self.patience:
            evidence = {"signal": "loss", "value": self.last}
            reason = f"the loss has been exactly {self.last:.6g} for {self.num_frozen} steps, its best was {self.beginning.best:.4g}"
            return _dead(reason, evidence)
        if self.num_constant >= 3 * self.patience:
            evidence = {"signal": "output_spread", "value": 0.0}
            reason = f"the model gives the same output for every sample of a batch, {self.num_constant} times in a row"
            return _dead(reason, evidence)
        size, rise = view.signals.get(f"{self.name}.weight_size"), self.config.far_above - 1.0
        return (
            self.beginning.moved_too_far(self.config.early_steps, max(view.lrs, default=0.0))
            or self.beginning.rose_from_start(self.config.early_steps, self.config.early_rise, size)
            or self.beginning.never_improved(self.config.no_progress_steps, rise)
            or COMMIT
        )

    def _has_vanished(self, norm: float) -> bool:
        if norm == 0.0:
            return True
        limit = self.config.vanished
        return bool(self.norms) and norm <= limit * self.norms.largest and norm <= limit * self.norms.center

    def learn(self, view: StepView, decision: Decision) -> None:
        loss, norm = view.loss, view.grad_norm
        if not math.isfinite(loss):
            return
        if decision.was_tried(self.name):
            self.patience *= 2
            self.num_dead = self.num_frozen = self.num_constant = 0
        size = view.signals.get(f"{self.name}.weight_size")
        self.beginning.learn(loss, size, view.update_size, max(view.lrs, default=0.0))
        if (spread := view.signals.get(f"{self.name}.output_spread")) is not None:
            self.num_constant = self.num_constant + 1 if spread == 0.0 else 0
        is_dead = self._has_vanished(norm) and loss != 0.0
        self.num_dead = self.num_dead + 1 if is_dead else 0
        if not is_dead:
            self.norms.add(norm)
        is_frozen = loss == self.last and loss > raised(self.beginning.best, self.config.far_above - 1.0)
        self.num_frozen = self.num_frozen + 1 if is_frozen else 0
        self.last = loss

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in COUNTS}
        last = self.last if math.isfinite(self.last) else None
        return {**counts, "last": last, "norms": list(self.norms), "beginning": self.beginning.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in COUNTS:
            setattr(self, name, state.get(name, 1))
        self.last = math.inf if state["last"] is None else state["last"]
        self.norms = Recent(50, state["norms"])
        self.beginning.load_state_dict(state["beginning"])


def _dead(reason: str, evidence: dict[str, Any]) -> Verdict:
    return Verdict(
        Action.ROLLBACK,
        reason=reason,
        evidence=evidence,
        findings=(Finding("dead_network", reason),),
        doubt=Doubt.DEAD,
    )


def _has_samples(leaf: Any) -> bool:
    """A tensor of floating-point numbers with more than one entry in its first dimension."""
    return hasattr(leaf, "is_floating_point") and leaf.is_floating_point() and leaf.dim() > 0 and len(leaf) > 1
