"""Variables by name."""

from __future__ import annotations

from .value import Value


class Scope:
    """Values by name, dotted names such as `self.scale` included; unknown names are looked up in the parent."""

    def __init__(self, parent: Scope | None = None, names: dict[str, Value] | None = None) -> None:
        self.parent = parent
        self.names = {} if names is None else names

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None
