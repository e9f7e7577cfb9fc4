"""A clear error for a framework that is not installed, or too old."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from ..errors import UsageError


def require(package: str, oldest: str, extra: str) -> str:
    """The installed version of a package, which must be at least `oldest`."""
    to_fix = f'To fix: pip install "safetrain[{extra}]", or pip install "{package}>={oldest}".'
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"this needs {package}, which is not installed.\n{to_fix}")
    version = importlib.metadata.version(package)
    if numbers(version) < numbers(oldest):
        raise UsageError(f"this needs {package} {oldest} or newer, and {version} is installed.\n{to_fix}")
    return version


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
