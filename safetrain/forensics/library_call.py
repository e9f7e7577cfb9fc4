"""The call from the user's own line into a library: its arguments, and the eps-like options on the way to the operation."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from ..tensors.nest import in_code, named_tensors
from .frames import is_user
from .ownership import LIBRARY, is_own, owner_of
from .storages import Storages

_EPS = re.compile(r"(^|_)(eps|epsilon|smooth|jitter|ridge|tiny)(_|$)", re.IGNORECASE)
_WRAPPERS = {"wrapper", "wrapped", "inner", "decorate_context", "decorated", "func", "_wrapped_call_impl", "_call_impl"}
SMALL = 1e-12
"""An eps that is no larger is none."""


@dataclass(frozen=True)
class Option:
    """A constant of the library that is there to keep its arithmetic finite, and is too small for that."""

    owner: Any
    attribute: str
    value: float

    @property
    def text(self) -> str:
        return f"{type(self.owner).__name__}({self.attribute}={{:g}})"


@dataclass
class LibraryCall:
    function: str
    """As a person knows it: `kl_divergence`, `GraphNorm`."""
    arguments: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By storage: which argument its tensor is in, counted from 1, and how it is spelt inside the function."""
    options: list[Option] = field(default_factory=list)


@dataclass(frozen=True)
class Carried:
    """The argument of the call that carries the fatal value into the library."""

    function: str
    number: int
    name: str
    value: str
    """Which of its elements, and what they are."""

    @property
    def text(self) -> str:
        root = re.split(r"[.\[]", self.name)[0]
        nth = {1: "1st ", 2: "2nd ", 3: "3rd "}.get(self.number, "")  # of more, people give the name
        return f"the {nth}argument of `{self.function}`, `{root}`: {self.name}{self.value}"


def library_call(storages: Storages) -> LibraryCall | None:
    """Of the operation that is running now; None when the user's own code runs it, or calls nothing but torch for it."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if owner_of(frame.f_code.co_filename) == LIBRARY and is_user(frame.f_code):
            frames.append(frame)
        frame = frame.f_back
    if frame is None or not frames:
        return None
    entry = next((f for f in reversed(frames) if f.f_code.co_name not in _WRAPPERS), frames[-1])
    found = LibraryCall(_name_of(entry))
    for number, name, value in _arguments(entry):
        for path, tensor in named_tensors(value, partial(in_code, name=name)):
            found.arguments.setdefault(storages.region(tensor).storage, (number, path))
    seen = set()
    for each in frames:
        owner = each.f_locals.get("self")
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            found.options += _options(owner)
    return found


def _name_of(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    if owner is None:
        return name
    kind = type(owner).__name__
    return kind if isinstance(owner, nn.Module) or name in ("__call__", "forward") else f"{kind}.{name}"


def _arguments(frame: FrameType) -> Iterator[tuple[int, str, Any]]:
    """Number, name and value of each argument, without `self`."""
    code, known = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:count])
    if names[:1] in (["self"], ["cls"], ["ctx"]):
        names.pop(0)
    number = 0
    for number, name in enumerate(names, 1):
        if name in known:
            yield number, name, known[name]
    rest = code.co_varnames[count : count + 2]
    if code.co_flags & inspect.CO_VARARGS and rest:
        for index, value in enumerate(known.get(rest[0], ())):
            yield number + 1 + index, f"{rest[0]}[{index}]", value
        rest = rest[1:]
    if code.co_flags & inspect.CO_VARKEYWORDS and rest:
        for index, (name, value) in enumerate(known.get(rest[0], {}).items()):
            yield number + 1 + index, name, value


def _options(owner: Any) -> Iterator[Option]:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if type(value) in (float, int) and _EPS.search(name) and abs(value) <= SMALL:
            yield Option(owner, name, float(value))
