"""Earlier import paths of public modules. `import safetrain.optimizers` gives the very module `safetrain.optim.optimizers`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "safetrain.bundle": "safetrain.incidents.bundle",
    "safetrain.incident": "safetrain.core.incident",
    "safetrain.islands": "safetrain.precision.islands",
    "safetrain.optimizers": "safetrain.optim.optimizers",
    "safetrain.options": "safetrain.core.options",
    "safetrain.replaying": "safetrain.incidents.replay",
    "safetrain.result": "safetrain.core.result",
    "safetrain.state": "safetrain.checkpoint.state",
    "safetrain.transaction": "safetrain.step.transaction",
    "safetrain.verdict": "safetrain.core.verdict",
    "safetrain.view": "safetrain.core.view",
}


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Nothing is imported before an alias is."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        self._own_spec = module.__spec__  # the import system is about to overwrite it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


def install() -> None:
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.append(_Aliases())
