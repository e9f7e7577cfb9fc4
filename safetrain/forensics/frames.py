"""Maps Python frames to the module that was executing and the line of the user's own file."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

from .._private.autograd import ENGINE_CALL, MODULE_CALL
from .ownership import LIBRARY, OWN, is_own, library_of, owner_of

_TORCH = str(Path(torch.__file__).parent) + os.sep
_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
# Libraries whose lines say nothing about the model: they pass calls on, or run the loop.
_PLUMBING = (
    "/accelerate/", "/einops/", "/opt_einsum/", "/_pytest/", "/pluggy/", "/jaxtyping/", "/beartype/", "/typeguard/", "/decorator.py"
)  # fmt: skip
_SHOWN_OF_TORCH = tuple(os.path.join(_TORCH, path) for path in ("nn", "distributions", "optim", "functional.py"))
_MODULE_FILE = os.path.join(_TORCH, "nn", "modules", "module.py")
MAX_CHAIN = 12


class Frame(NamedTuple):
    code: CodeType
    line: int
    module: nn.Module | None
    """The module being called, for frames of `nn.Module.__call__`."""


class Place(NamedTuple):
    file: str
    line: int
    text: str
    function: str


def source_of(frame: Frame) -> str:
    """The line that runs in a frame; empty where there is no source."""
    return linecache.getline(frame.code.co_filename, frame.line).strip()


def stack(until: CodeType | None = None, skip: int = 1) -> list[Frame]:
    """The frames of the caller, innermost first, up to and without the function `until`."""
    frames = []
    frame: FrameType | None = sys._getframe(skip + 1)
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        frames.append(Frame(code, frame.f_lineno, frame.f_locals.get("self") if code is MODULE_CALL else None))
        frame = frame.f_back
    return frames


def stack_of(trace: TracebackType | None) -> list[Frame]:
    """The frames of an exception, innermost first."""
    frames = [
        Frame(f.f_code, line, f.f_locals.get("self") if f.f_code is MODULE_CALL else None)
        for f, line in traceback.walk_tb(trace)
    ]
    return frames[::-1]


def is_user(code: CodeType) -> bool:
    """Is this a line to show for an operation: the user's own, or one of a library other than torch?"""
    file = code.co_filename
    if file.startswith(_TORCH) or owner_of(file) not in (OWN, LIBRARY):
        return False
    file = file.replace(os.sep, "/")
    return not any(part in file for part in _PLUMBING)


def inside_engine(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames below the autograd engine (custom backward, hooks, recomputation), or none when it is not running."""
    for index, frame in enumerate(frames):
        if frame.code is ENGINE_CALL:
            return frames[:index]
    return []


def is_recomputation(frames: Iterable[Frame]) -> bool:
    """Is this a forward pass repeated in backward by gradient checkpointing?"""
    return any(frame.code.co_filename == _CHECKPOINT for frame in frames)


def outside_function(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Without the inside of a custom `autograd.Function`: from the line that applies it."""
    for index, frame in enumerate(frames):
        if frame.code.co_name == "apply" and frame.code.co_filename == _FUNCTION:
            return frames[index + 1 :]
    return frames


def user_place(frames: Iterable[Frame]) -> Place | None:
    for frame in frames:
        if is_user(frame.code):
            file = frame.code.co_filename
            return Place(file, frame.line, source_of(frame), frame.code.co_name)
    return None


def own_place(frames: Iterable[Frame]) -> Place | None:
    """The innermost line of the user's own code: who called the library that ran the operation."""
    for frame in frames:
        if is_own(frame.code.co_filename):
            return Place(frame.code.co_filename, frame.line, source_of(frame), frame.code.co_name)
    return None


def call_chain(frames: Sequence[Frame]) -> list[dict[str, str | int | None]]:
    """From the innermost line of the user's own code down to the operation, outermost first; without what only passes calls on.

    Empty when the user's own line is the only one.
    """
    chain: list[dict[str, str | int | None]] = []
    for frame in frames:
        file = frame.code.co_filename
        if owner_of(file) not in (OWN, LIBRARY) or file == _MODULE_FILE:
            continue
        if file.startswith(_TORCH) and not file.startswith(_SHOWN_OF_TORCH):
            continue
        chain.append(
            {
                "file": file,
                "line": frame.line,
                "code": source_of(frame),
                "function": frame.code.co_name,
                "library": library_of(file),
            }
        )
        if is_own(file):
            break
    if len(chain) > MAX_CHAIN:
        chain = [*chain[: MAX_CHAIN // 2], *chain[-(MAX_CHAIN // 2) :]]
    return chain[::-1] if len(chain) > 1 else []


def innermost_module(frames: Iterable[Frame], names: dict[int, str]) -> tuple[str, nn.Module] | None:
    """Path and module of the innermost call of a module in `names` (by id)."""
    for frame in frames:
        if frame.module is not None and id(frame.module) in names:
            return names[id(frame.module)], frame.module
    return None
