"""Runs a program as if its source had been changed: the code of the functions around a line is exchanged for a while."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType


@contextmanager
def as_if_changed(
    functions: list[FunctionType], file: str, source: str, changed: str, line: int, names: dict[str, object]
) -> Iterator[int]:
    """Inside, those of these functions of a file that are around this line run the changed source, in which `names` are known too. Gives their number.

    The change must not add or remove functions. A function that cannot take the new code keeps its own.
    """
    pairs = list(zip(_codes(_compiled(source, file)), _codes(compile(changed, file, "exec")), strict=True))
    renewed = {(old.co_name, old.co_firstlineno): new for old, new in pairs if _covers(old, line)}
    exchanged: list[tuple[FunctionType, CodeType]] = []
    added: list[tuple[dict[str, object], str]] = []
    try:
        for function in functions:
            code = function.__code__
            new = renewed.get((code.co_name, code.co_firstlineno))
            if new is None or new.co_freevars != code.co_freevars:
                continue
            for name, value in names.items():
                if name not in function.__globals__:
                    function.__globals__[name] = value
                    added.append((function.__globals__, name))
            exchanged.append((function, code))
            function.__code__ = new
        yield len(exchanged)
    finally:
        for function, code in exchanged:
            function.__code__ = code
        for scope, name in added:
            scope.pop(name, None)


@lru_cache(maxsize=4)
def _compiled(source: str, file: str) -> CodeType:
    return compile(source, file, "exec")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _covers(code: CodeType, line: int) -> bool:
    lines = [number for _, _, number in code.co_lines() if number is not None]
    inner = [number for each in _codes(code) for _, _, number in each.co_lines() if number is not None]
    return bool(lines) and code.co_firstlineno <= line <= max(inner)


def functions_of(file: str) -> list[FunctionType]:
    """Every function of this file that exists. Goes through all objects of the process, some tenths of a second."""
    base, real = os.path.basename(file), os.path.realpath(file)
    is_same: dict[str, bool] = {}
    found = []
    for item in gc.get_objects():
        if type(item) is FunctionType:
            name = item.__code__.co_filename
            if name not in is_same:
                is_same[name] = name.endswith(base) and (name == file or os.path.realpath(name) == real)
            if is_same[name]:
                found.append(item)
    return found
