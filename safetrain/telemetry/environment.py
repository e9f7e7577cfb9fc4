"""The environment of a run: versions, devices, and which undocumented features work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("safetrain", "torch", "accelerate", "omegaconf", "tensorboard", "numpy", "safetensors", "click", "rich")


def environment() -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    facts.update({package: _version(package) for package in PACKAGES})
    facts["cpus"] = os.cpu_count()
    return {**facts, **_devices()}


def undocumented() -> dict[str, dict[str, Any]]:
    """Undocumented features that are relied on, by name. Tries all of them out, which takes seconds."""
    try:
        from .._private.table import FEATURES, check_names
    except ImportError:  # a machine without torch
        return {}
    check_names()
    facts = ("works", "relies_on", "lost", "instead", "failure")
    return {feature.name: {fact: getattr(feature, fact) for fact in facts} for feature in FEATURES}


def _version(package: str) -> str:
    if package == "safetrain":  # true also in a source checkout that is not installed
        from .. import __version__

        return __version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"cuda": f"unknown: {error}"}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = None if accelerator is None else torch.get_device_module(accelerator)
    name_of = getattr(module, "get_device_name", lambda index: f"{accelerator}:{index}")
    names = [name_of(index) for index in range(torch.accelerator.device_count())] if accelerator else []
    return {
        "cuda": torch.version.cuda or "not built in",
        "cuda available": torch.cuda.is_available(),
        "accelerator": "none" if accelerator is None else accelerator.type,
        "devices": names or ["cpu"],
    }
