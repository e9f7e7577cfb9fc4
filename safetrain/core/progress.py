"""How far something that takes a while has come: told by whoever does it, to whoever shows it, without knowing each other.

with shown_by(lambda what, done, total: print(what, done, total)):
    for index, batch in enumerate(batches):
        note("scanning", index, len(batches))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, "int | None"], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
"""Of this thread only: what a thread in the background does is not what the program waits for."""


def note(what: str, done: int, total: int | None = None) -> None:
    """So much of it is done. Costs next to nothing when nobody listens."""
    if (listener := _listener.get()) is not None:
        listener(what, done, total)


@contextmanager
def shown_by(listener: Listener) -> Iterator[None]:
    """What is noted inside goes to this listener; it is called often and decides itself when to draw."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
