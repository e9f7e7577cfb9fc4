"""The one place that writes files: whole or not at all, and JSON that every parser accepts. And reads them, if they are not too large."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
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


def relative_to(path: str | Path, start: str | Path = ".") -> str:
    """The path as seen from `start`; itself where there is no way, as between two drives."""
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return str(path)


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), allow_nan=False, indent=indent)


MAX_TEXT = 256 * 2**20


def read_text(path: Path, max_bytes: int = MAX_TEXT) -> str:
    """The text of a file that may come from anywhere. Raises OSError for what is no ordinary file, or larger than that; bytes that
    are not UTF-8 are replaced."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        if about.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {about.st_size >> 20} MB, more than {max_bytes >> 20}", str(path))
        return file.read(max_bytes).decode("utf-8", errors="replace")


def sync(descriptor: int) -> None:
    """fsync, where the file system can: some network and user-space ones cannot, and say so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS):
            raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path given; on leaving it is flushed to disk and renamed to `path`: old file or new, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            sync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
