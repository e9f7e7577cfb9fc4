"""Signals that ask a run to end: the step is finished and the state saved first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

INSISTENT = ("SIGINT", "SIGTERM")
"""What people and launchers send again when they do not want to wait."""


@contextmanager
def signals_noted(names: Iterable[str] | None, note: Callable[[int], None]) -> Iterator[None]:
    """Inside, the first signal of each kind only calls `note`; a second SIGINT or SIGTERM ends the process at once.

    SIGINT and SIGTERM are always among them (None: no signal is). Of the others, those that the program handles or ignores itself (`nohup`) are left alone.
    """
    if names is None or threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before: dict[int, Any] = {}

    def handle(signum: int, frame: object) -> None:
        note(signum)
        if signal.Signals(signum).name in INSISTENT:
            signal.signal(signum, before[signum])
        # A signal to the whole process group ends the loader's workers too, of which torch would raise in the middle of a step.
        if hasattr(signal, "SIGCHLD") and signal.SIGCHLD not in before:
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    try:
        for name in dict.fromkeys((*INSISTENT, *names)):
            number = getattr(signal, name, None)  # Windows has few of them
            if number is not None and (name in INSISTENT or signal.getsignal(number) is signal.SIG_DFL):
                before[number] = signal.getsignal(number)
                signal.signal(number, handle)
        yield
    finally:
        for number, handler in list(before.items()):
            signal.signal(number, handler)


def acknowledge(signum: int, is_shown: bool) -> int:
    """Show the person who waits that the signal has arrived; returns it. Not through the console, which may be in the middle of a line."""
    if not is_shown:
        return signum
    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    text = f"\n{name}: the step is finished and the state saved, then the run ends; once more ends it at once\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    return signum
