"""Keeps named modules, and the loss, in float32 while the rest runs under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.verdict import COMMIT, Verdict
from ..core.view import StepView
from .base import Guard

if TYPE_CHECKING:
    from torch import nn

LOSS = "loss"


@dataclass
class IslandsConfig:
    modules: list[str] = field(default_factory=list)
    """Globs over module names (`"*.norm"`, `"blocks.3.*"`) or type names (`LayerNorm`) of what computes in float32, forward
    and backward. The word `loss` means the option below. A glob that matches nothing is an error."""
    loss: bool = False
    """Open autocast inside the model's own `forward` only: its outputs are cast to float32, and everything else that
    `training_step` computes is float32. Modules that it calls past the model's `forward` are then float32 too."""


class Islands(Guard):
    """Never refuses. More islands can be grown while it runs; they are saved and restored with it."""

    Config = IslandsConfig
    config: IslandsConfig

    def __init__(self, config: IslandsConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.grown: list[str] = []  # names of modules, or `loss`
        self._model: nn.Module | None = None
        self._remove: list[Callable[[], None]] = []
        self._remove_grown: dict[str, Callable[[], None]] = {}

    def attach(self, model: nn.Module) -> Callable[[], None]:
        from ..tensors.module_globs import matching

        globs = [glob for glob in self.config.modules if glob != LOSS]
        names = list(matching(model, globs, "guards.islands.modules"))
        if self.config.loss or LOSS in self.config.modules:
            names.append(LOSS)
        self._model = model
        try:
            self._install(model, [*names, *self.grown])
        except Exception:
            self._detach()
            raise
        return self._detach

    def grow(self, model: nn.Module, name: str) -> None:
        """Make the module of that name (or `loss`) an island from the next forward pass on, and remember it."""
        if name not in self.grown:
            self._install(model, [name])
            self.grown.append(name)
            self._remove_grown[name] = self._remove[-1]

    def shrink(self, name: str) -> None:
        """Take back what was just grown: it did not help."""
        if (remove := self._remove_grown.pop(name, None)) is not None:
            remove()
            self.grown.remove(name)

    def yaml(self) -> str:
        """The config that makes the islands grown so far permanent; empty when none was."""
        if not self.grown:
            return ""
        from yaml import safe_dump

        modules = dict.fromkeys([*self.config.modules, *self.grown])
        options: dict[str, Any] = {"modules": [name for name in modules if name != LOSS]}
        if self.config.loss or LOSS in modules:
            options["loss"] = True
        return safe_dump({"guards": {"islands": options}}, sort_keys=False)

    def judge(self, view: StepView) -> Verdict:
        return COMMIT

    def state_dict(self) -> dict[str, Any]:
        return {"grown": list(self.grown)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was grown since stays: going back must not bring back the overflow that it cured."""
        missing = [name for name in state["grown"] if name not in self.grown]
        if self._model is not None:
            self._install(self._model, missing)
        self.grown += missing

    def _install(self, model: nn.Module, names: Iterable[str]) -> None:
        from ..precision import islands
        from ..tensors.module_globs import named

        for name in names:
            self._remove.append(islands.loss_island(model) if name == LOSS else islands.island(named(model, name)))

    def _detach(self) -> None:
        while self._remove:
            self._remove.pop()()
        self._model = None
