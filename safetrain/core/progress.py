"""Progress of long work: reported by the code that does it, shown by a listener that the code does not know.

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
"""Per thread: the program does not wait for what a background thread does."""


def note(what: str, done: int, total: int | None = None) -> None:
    """Report that `done` of `total` are done. Costs next to nothing without a listener."""
    if (listener := _listener.get()) is not None:
        listener(what, done, total)


@contextmanager
def shown_by(listener: Listener) -> Iterator[None]:
    """Progress that is reported inside goes to this listener, which is called often and decides itself when to draw."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
