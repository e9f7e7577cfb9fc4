"""Safe variants of operations that run at certain lines of the user's code, until the source is fixed."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from .forensics.frames import Place
from .forensics.substitutes import SafeVariant


class Patches:
    """A context manager around the forward pass. Costs nothing as long as there is no patch."""

    def __init__(self) -> None:
        self._active: dict[tuple[str, int, str | None], SafeVariant] = {}
        self._stack: ExitStack | None = None

    def add(self, file: str, line: int, function: str | None) -> str:
        """Replace this function at this line, or all that have a safe variant (None); says what was done."""
        place = Place(file, line, linecache.getline(file, line).strip(), "")
        self._active[file, line, function] = SafeVariant(place, None if function is None else {function})
        return f"{function or 'what is unsafe'} at {file}:{line} runs as its safe variant from now on"

    def remove(self, file: str, line: int, function: str | None) -> None:
        self._active.pop((file, line, function), None)

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

    def uses(self) -> dict[str, int]:
        """How often each patch was used, by `file:line function`."""
        return {f"{f}:{line} {name or '*'}": variant.num_hits for (f, line, name), variant in self._active.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"patches": [[*key, variant.num_hits] for key, variant in self._active.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for file, line, function, num_hits in state["patches"]:
            if (file, line, function) not in self._active:
                self.add(file, line, function)
                self._active[file, line, function].num_hits = num_hits
