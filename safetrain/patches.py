"""Safe variants of operations that run at certain lines of the user's code, until the source is fixed."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from .forensics.frames import Place
from .forensics.substitutes import Patch, SafeVariant


class Patches:
    """A context manager around forward pass and update. Costs nothing as long as there is no patch."""

    def __init__(self) -> None:
        self._active: dict[Patch, SafeVariant] = {}
        self._stack: ExitStack | None = None

    def add(self, patch: Patch) -> str:
        """Put it in from the next step on; says what was done."""
        self._active[patch] = patch.active()
        return f"{_spoken(patch)} runs as its safe variant from now on"

    def remove(self, patch: Patch) -> None:
        self._active.pop(patch, None)

    def __enter__(self) -> None:
        if self._active:
            self._stack = ExitStack()
            for variant in self._active.values():
                self._stack.enter_context(variant)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the patches active while it runs; the function itself when there is none."""
        return partial(self._call, function) if self._active else function

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return function(*args, **kwargs)

    def uses(self) -> dict[str, int]:
        """How often each patch was used, by what it is in words."""
        return {_spoken(patch): variant.num_hits for patch, variant in self._active.items()}

    def state_dict(self) -> dict[str, Any]:
        entries = []
        for patch, variant in self._active.items():
            names = None if patch.names is None else sorted(patch.names)
            entries.append([patch.place.file, patch.place.line, patch.place.function, names, variant.num_hits])
        return {"patches": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for file, line, function, names, num_hits in state["patches"]:
            place = Place(file, line, linecache.getline(file, line).strip(), function)
            patch = Patch(place, None if names is None else frozenset(names))
            if patch not in self._active:
                self.add(patch)
                self._active[patch].num_hits = num_hits


def _spoken(patch: Patch) -> str:
    names = "what is unsafe" if patch.names is None else ", ".join(sorted(patch.names))
    return f"{names} at {patch.place.file}:{patch.place.line}"
