"""Which code a run's config may name when the run came from somewhere else: `safetrain replay` imports and calls no other.

A config can name anything that Python can import, `os.system` too, so a bundle out of a bug report is a program. Without
`--trust` a target must be defined

    in a file of the current project: below the current directory, and not inside the run's own directory
    in the recipes that ship with safetrain, or in `safetrain.safe`; or be one of the optimizers of `safetrain.optimizers`
    in torch, as a module, an optimizer, a schedule, a data set or loader, or a function of `torch.nn.functional`

What matters is where the object that is called was defined: `./model.py:os.system` is not the project's.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..errors import UsageError


class Trust:
    def __init__(self, run_dir: Path, everything: bool = False) -> None:
        self.everything = everything
        """`--trust`: everything may run."""
        self._project = Path.cwd().resolve()
        self._run_dir = run_dir.resolve()

    def check(self, config: Any) -> None:
        """Raise UsageError if the config, or any argument in it, names something else. Imports only what may run."""
        if self.everything:
            return
        foreign = [target for target in dict.fromkeys(_targets(config)) if not self.allows(target)]
        if foreign:
            raise UsageError(
                f"the config of this run names code from outside the current project ({self._project}), which was not run:\n"
                + "\n".join(f"  - {target}" for target in foreign)
                + "\nTo fix: run the command in the project's directory; or look at that code and at the config, and add --trust."
            )

    def allows(self, target: str) -> bool:
        if self.everything:
            return True
        from ..config import import_target
        from ..config.targets import split_target

        try:
            file, name = split_target(target)
        except ValueError:
            return False
        if not (self._allows_file(file) if file is not None else self._allows_name(name)):
            return False
        return self.allows_object(import_target(target))

    def _allows_file(self, file: Path) -> bool:
        from ..config.sources import bundled_dir

        path = file.resolve()
        if path.is_relative_to(bundled_dir().resolve() / "recipes"):
            return True
        # Also if they lie below the current directory: their functions run code that they are given.
        libraries = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")).resolve())
        if "site-packages" in path.parts or any(path.is_relative_to(library) for library in libraries):
            return False
        # A run that was unpacked here brings its own files. A run whose directory is the project itself does not.
        is_brought = path.is_relative_to(self._run_dir) and not self._project.is_relative_to(self._run_dir)
        return path.is_relative_to(self._project) and not is_brought

    def _allows_name(self, name: str) -> bool:
        """May the module of a dotted name be imported? Found out without importing it."""
        top = name.partition(".")[0]
        if top in ("torch", "safetrain"):
            return True
        if top in sys.modules:
            return self._allows_module(top)
        paths = [os.getcwd(), *(path for path in sys.path if path)]
        spec = PathFinder.find_spec(top, paths)
        if spec is None or top in sys.builtin_module_names:
            return False
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        return bool(places) and all(self._allows_file(Path(place)) for place in places)

    def allows_object(self, found: Any) -> bool:
        """Was it defined where it may be?"""
        if inspect.ismethod(found):  # a class method
            found = found.__func__
        name = getattr(found, "__module__", None)
        if not (inspect.isclass(found) or inspect.isfunction(found)) or not isinstance(name, str):
            return False
        return _is_building_block(found) or self._allows_module(name)

    def _allows_module(self, name: str) -> bool:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        places = [file] if file is not None else list(getattr(module, "__path__", ()))
        return bool(places) and all(self._allows_file(Path(place)) for place in places)


def _is_building_block(found: Any) -> bool:
    """Of torch or safetrain, and harmless whatever it is given; torch.load and torch.hub.load are not."""
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader, Dataset, Sampler

    from ..config import import_target
    from ..optim.optimizers import adamw, sgd

    module = found.__module__
    if not inspect.isclass(found):
        return bool(module == "torch.nn.functional" or module.startswith("safetrain.safe.") or found in (adamw, sgd))
    kinds = (nn.Module, Optimizer, LRScheduler, Dataset, DataLoader, Sampler)
    is_trainer = module.startswith("safetrain.") and found is import_target("safetrain.SafeTrainer")
    return is_trainer or (module.startswith("torch.") and issubclass(found, kinds))


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for child in node.values():
            yield from _targets(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _targets(child)
