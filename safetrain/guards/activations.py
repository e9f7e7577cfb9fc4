"""Watches the outputs and gradients of chosen modules, every N steps and after a refusal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Verdict
from ..core.view import DeviceStep, StepView
from .base import Guard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .probes import Probe


@dataclass
class ActivationsConfig:
    modules: list[str] = field(default_factory=lambda: ["*"])
    """Globs over module names or type names of what is watched: largest absolute value, share of zeros, and how near it is
    to the end of its type's range, for outputs and for their gradients."""
    every: int = option(50, ge=1)
    """Watch every N steps. The steps between have no hook on the model and cost nothing."""
    after_refusal: bool = True
    """Also watch each step that follows a refused one."""
    history: int = option(20, ge=1)
    """Watched steps that are remembered for the report of an incident."""
    max_abs: float | None = option(None, gt=0.0)
    """Refuse a watched step in which a module's output is larger than this, or NaN."""
    max_saturation: float | None = option(None, gt=0.0, le=1.0)
    """The same for an output above this share of the largest number that its type can hold (65504 in fp16)."""


class Activations(Guard):
    Config = ActivationsConfig
    config: ActivationsConfig
    over_ranks = "max"

    def __init__(self, config: ActivationsConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._modules: dict[str, nn.Module] = {}
        self._probe: Probe | None = None
        self._records: deque[dict[str, Any]] = deque(maxlen=self.config.history)

    def attach(self, model: nn.Module) -> Callable[[], None]:
        from ..tensors.module_globs import matching

        self._modules = matching(model, self.config.modules, "guards.activations.modules")
        return self._detach

    def begin(self, step: int, num_refused: int) -> None:
        self._take_off()  # a step that raised has left them on
        if self._modules and (step % self.config.every == 0 or (self.config.after_refusal and num_refused)):
            from .probes import Probe

            self._probe = Probe(self._modules).__enter__()

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        probe = self._take_off()
        return {} if probe is None else probe.signals(like=step.loss)

    def judge(self, view: StepView) -> Verdict:
        watched = self._watched(view)
        for module, numbers in watched.items():
            for name, limit in (("max_abs", self.config.max_abs), ("saturation", self.config.max_saturation)):
                if limit is not None and not numbers[name] <= limit:
                    reason = (
                        f"{name} of the output of {module or 'the model'} is {numbers[name]:.4g}, above {limit:.4g}"
                    )
                    found = {"signal": f"{module}.{name}", "value": numbers[name]}
                    return Verdict(Action.SKIP, reason=reason, evidence=found, recording=watched)
        return Verdict(recording=watched) if watched and view.in_trouble else COMMIT

    def learn(self, view: StepView, decision: Decision) -> None:
        if watched := self._watched(view):
            self._records.append({"step": view.step, "loss": view.loss, "modules": watched})

    def records(self) -> list[dict[str, Any]]:
        """The committed steps that were watched last, oldest first. A refused one has its numbers in its verdict."""
        return list(self._records)

    def _watched(self, view: StepView) -> dict[str, dict[str, float]]:
        from .probes import by_module

        return by_module(view.signals, self.name)

    def _take_off(self) -> Probe | None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.__exit__()
        return probe

    def _detach(self) -> None:
        self._take_off()
        self._modules = {}
