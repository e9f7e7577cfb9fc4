"""safetrain: a PyTorch training loop that cannot be silently ruined.

Names are imported when they are first used, so that the command line and the config never wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._private import aliases

if TYPE_CHECKING:
    from . import safe
    from .config import load_config
    from .core.incident import Incident
    from .core.options import option
    from .core.result import FitResult
    from .core.verdict import Action, Verdict
    from .core.view import DeviceStep, Limits, StepView
    from .errors import (
        CheckpointError,
        ConfigError,
        DataError,
        Interrupted,
        LossError,
        NonFiniteError,
        RunDirectoryError,
        SafetrainError,
        TrainingStopped,
        UsageError,
    )
    from .guards import Guard
    from .hosts.guard import LoopGuard, watch
    from .preflight import CheckReport, check
    from .trainer.trainer import SafeTrainer

__version__ = "0.1.0"

_HOMES = {
    "config": ("load_config",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "Interrupted",
        "LossError",
        "NonFiniteError",
        "RunDirectoryError",
        "SafetrainError",
        "TrainingStopped",
        "UsageError",
    ),
    "guards": ("Guard",),
    "hosts.guard": ("LoopGuard", "watch"),
    "core.incident": ("Incident",),
    "core.options": ("option",),
    "preflight": ("CheckReport", "check"),
    "core.result": ("FitResult",),
    "trainer.trainer": ("SafeTrainer",),
    "core.verdict": ("Action", "Verdict"),
    "core.view": ("DeviceStep", "Limits", "StepView"),
}
aliases.install()
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "CheckReport",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceStep",
    "FitResult",
    "Guard",
    "Incident",
    "Interrupted",
    "Limits",
    "LoopGuard",
    "LossError",
    "NonFiniteError",
    "RunDirectoryError",
    "SafeTrainer",
    "SafetrainError",
    "StepView",
    "TrainingStopped",
    "UsageError",
    "Verdict",
    "check",
    "load_config",
    "option",
    "safe",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "safe":
        return importlib.import_module("safetrain.safe")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'safetrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"safetrain.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
