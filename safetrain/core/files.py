"""The one place that writes files: whole or not at all, and JSON that every parser accepts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The same value out of JSON's types; non-finite numbers become strings ("nan", "inf", "-inf"), never null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # tensors and numpy values
        return plain(value.tolist())
    return str(value)


def as_number(value: Any) -> Any:
    """What `plain` was given, if it was a number."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), allow_nan=False, indent=indent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path given; on leaving it is flushed to disk and renamed to `path`: old file or new, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
