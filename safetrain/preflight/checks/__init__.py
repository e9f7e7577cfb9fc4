"""Every check, in the order in which they run: cheap ones first, causes before their consequences.

To add a check, write a function with `@preflight_check` in one of these modules, or in a new one; within a module they run
from top to bottom. It gets a `Subject`, which reads the data and runs the first steps once for all checks, and returns `passed`,
`warned`, `failed` or `skipped`. Whatever it does to model, optimizer or random state belongs inside `with subject.clean():`.
`scripts/docs` writes its row into docs/check.md.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..registry import Check

_ORDER = (
    *("data", "labels", "empty", "overlap", "weights", "schedule", "steps", "wiring", "search", "loss", "evaluation"),
    *("trials", "repeat"),
    "source",
)
"""Modules that are not named here run last."""


def collect() -> tuple[Check, ...]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    names.sort(key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(each for module in modules for each in vars(module).values() if isinstance(each, Check))


CHECKS = collect()

__all__ = ["CHECKS", "collect"]
