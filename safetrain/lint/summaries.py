"""What functions and modules of your own return: of the file that is checked, and of the files that it imports."""

from __future__ import annotations

import ast
import functools
import warnings
from pathlib import Path

from .value import Value
from .walk import Walker

KEPT = ("softmax", "sigmoid", "log_softmax", "relu", "softplus", "tanh")
"""Operations whose result is recognised after a call; of others only the bounds are known."""
LEVELS = 4
"""Directories above the file in which an imported module is looked for."""


class Summaries:
    def __init__(self, tree: ast.Module, path: str) -> None:
        self._own = _returned(tree)
        self._directory = Path(path).parent if Path(path).is_file() else None

    def __call__(self, name: str) -> Value | None:
        """Of a function by its dotted name as the file spells it, or an import resolves it."""
        if name in self._own:
            return self._own[name]
        level = len(name) - len(name.lstrip("."))
        parts = name.lstrip(".").split(".")
        if self._directory is None or len(parts) < 2 or parts[0] in ("torch", "self", "numpy", "math"):
            return None
        for size in range(min(len(parts) - 1, 4), 0, -1):
            if (path := _module_file(str(self._directory), level, tuple(parts[:size]))) is not None:
                return _of_file(path, Path(path).stat().st_mtime_ns).get(".".join(parts[size:]))
        return None


@functools.lru_cache(maxsize=4096)
def _module_file(directory: str, level: int, parts: tuple[str, ...]) -> str | None:
    above = [Path(directory), *Path(directory).parents][:LEVELS]
    for place in above[level - 1 : level] if level else above:
        for path in (place.joinpath(*parts[:-1], f"{parts[-1]}.py"), place.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return str(path)
    return None


@functools.lru_cache(maxsize=256)
def _of_file(path: str, changed: int) -> dict[str, Value]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _returned(ast.parse(Path(path).read_bytes(), filename=path))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return {}


def _returned(tree: ast.Module) -> dict[str, Value]:
    walker = Walker(lambda value, context: None, lambda routine: None)
    walker.file(tree)
    return {name: _facts(value) for name, value in walker.returned.items() if name and not value.host}


def _facts(value: Value) -> Value:
    """Without the expressions that it was computed by."""
    op = value.op if value.op in KEPT else "call"
    return Value(op, low=value.low, high=value.high, zero=value.zero, dtype=value.dtype)
