"""The guards that ship with safetrain: one file, one config dataclass, one name each."""

from __future__ import annotations

import importlib
import pkgutil

from .base import REGISTRY, Guard

DEFAULT = ("finite", "clip", "backoff", "spike", "rollback", "stall", "sanity")
"""Guards that are on unless the config turns them off with `null`."""

_NOT_GUARDS = (
    *("batch_checks", "guard_set", "probes", "statistics"),
    *("course", "data_looks", "fingerprint", "graph", "loss_graph", "modes", "weights"),
)
"""What guards use. Most of these need torch, which reading a config must not import."""

for _module in pkgutil.iter_modules(__path__):
    if _module.name not in _NOT_GUARDS:
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DEFAULT", "REGISTRY", "Guard"]
