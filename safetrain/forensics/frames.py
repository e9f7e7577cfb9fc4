"""From Python frames to what a person recognises: the module that was executing and the line of the user's own file."""

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

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_BUNDLED = _PACKAGE + "bundled" + os.sep
_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
# Libraries whose lines say nothing about the model: they pass calls on, or run the loop.
_PLUMBING = ("/contextlib.py", "/threading.py", "/functools.py", "/accelerate/", "/einops/", "/opt_einsum/", "/pytest/")


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
    file = code.co_filename
    if file.startswith(_TORCH) or (file.startswith("<") and not file.startswith(("<stdin", "<ipython"))):
        return False
    if file.startswith(_PACKAGE) and not file.startswith(_BUNDLED):
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


def innermost_module(frames: Iterable[Frame], names: dict[int, str]) -> tuple[str, nn.Module] | None:
    """Path and module of the innermost call of a module in `names` (by id)."""
    for frame in frames:
        if frame.module is not None and id(frame.module) in names:
            return names[id(frame.module)], frame.module
    return None
