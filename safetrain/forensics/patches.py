"""Safe variants of operations that run at certain lines of the user's code, until the source is fixed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from ..core.text import source_of_file
from .backward_functions import FiniteBackward
from .frames import Place
from .substitutes import Patch, SafeVariant


@dataclass
class Active:
    """A patch that is in, and the change of the source that replaces it."""

    variant: SafeVariant | FiniteBackward
    fix: str


_NOTHING = nullcontext()


class Patches:
    """A context manager around forward, backward and update; `scope` is one that costs nothing as long as there is no patch."""

    def __init__(self) -> None:
        self._active: dict[Patch, Active] = {}
        self.scope: AbstractContextManager[None] = _NOTHING
        self._stack: ExitStack | None = None

    def add(self, patch: Patch, fix: str = "") -> str | None:
        """Put it in from the next step on; returns what was done in words, or None if it was in already."""
        if patch in self._active:
            return None
        self._active[patch] = Active(patch.active(), fix)
        self.scope = self
        return f"{_described(patch)} runs as its safe variant from now on"

    def remove(self, patch: Patch) -> None:
        self._active.pop(patch, None)
        self.scope = self if self._active else _NOTHING

    def __enter__(self) -> None:
        if self._active:
            self._stack = ExitStack()
            for active in self._active.values():
                self._stack.enter_context(active.variant)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """In effect inside, without counting its uses: for a step that is only examined."""
        num_hits = [active.variant.num_hits for active in self._active.values()]
        with self:
            yield
        for active, before in zip(self._active.values(), num_hits, strict=True):
            active.variant.num_hits = before

    def descriptions(self) -> list[str]:
        return [_described(patch) for patch in self._active]

    def to_plain(self) -> list[dict[str, Any]]:
        """Each patch with how often it was used, and the change of the source that makes it permanent."""
        return [
            {
                "file": patch.place.file,
                "line": patch.place.line,
                "code": patch.place.text,
                "operations": None if patch.names is None else sorted(patch.names),
                "is_fused": patch.is_fused,
                "num_uses": active.variant.num_hits,
                "fix": active.fix,
            }
            for patch, active in self._active.items()
        ]

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the patches active while it runs; the function itself when there is none."""
        return partial(self._call, function) if self._active else function

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        functions = [patch.place.function for patch in self._active]
        entries = zip(self.to_plain(), functions, strict=True)
        return {"patches": [{**entry, "function": function} for entry, function in entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A patch whose line has changed is left out, with a warning."""
        for entry in state["patches"]:
            file, line, names = entry["file"], entry["line"], entry["operations"]
            source = source_of_file(file)
            patch = Patch(
                Place(file, line, entry["code"], entry["function"]),
                None if names is None else frozenset(names),
                entry.get("is_fused", False),
            )
            if not 0 < line <= len(source) or source[line - 1].strip() != entry["code"]:
                logging.getLogger("safetrain").warning("%s has changed, its patch is no longer in", _described(patch))
            elif self.add(patch, entry["fix"]) is not None:
                self._active[patch].variant.num_hits = entry["num_uses"]


def _described(patch: Patch) -> str:
    if patch.is_fused:
        return f"what is computed at {patch.place.file}:{patch.place.line}, in one piece with what follows,"
    names = "what is unsafe" if patch.names is None else ", ".join(sorted(patch.names))
    return f"{names} at {patch.place.file}:{patch.place.line}"
