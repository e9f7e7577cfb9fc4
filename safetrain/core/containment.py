"""The one place for exceptions in safetrain's own guards, rungs, sinks and forensics: reported, and the run goes on without that part.

What watches a run must not end it while it is healthy. Exceptions of the user's code, and errors that safetrain raises on purpose, are
never contained. In strict mode (`safetrain fit --strict`, or `containment.strict = True`) everything is raised.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import SafetrainError

strict = False
"""Raise instead. The tests do, so that no mistake is hidden."""
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_PACKAGE = __package__.partition(".")[0]


@contextmanager
def reported_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, what is contained is reported to this function too, and not only to the log."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def is_contained(error: Exception, part: object, what: str, instead: str) -> bool:
    """Whether the run goes on without the part of safetrain that raised: then it was reported, with what happens `instead`.

    False: the caller raises it again. A subclass of the user's is the user's code, as is what a step of the user's raised in it.
    """
    if strict or isinstance(error, SafetrainError) or not _is_ours(part):
        return False
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = f"{what} raised {type(error).__name__}: {error}. This is a mistake in safetrain; {instead}. Please report it:\n{trace}"
    report(text)
    return True


def report(text: str) -> None:
    """To the log, and where `reported_to` says."""
    logging.getLogger("safetrain").warning("%s", text)
    if (listener := _listener.get()) is not None:
        try:
            listener(text)
        except Exception as second:  # what reports is broken too; the log has it
            logging.getLogger("safetrain").warning("it could not be reported: %r", second)


@contextmanager
def contained(part: object, what: str, instead: str) -> Iterator[None]:
    """For what has nothing to be undone: inside, an exception of safetrain's own is reported and ends the block, not the run."""
    try:
        yield
    except Exception as error:
        if not is_contained(error, part, what, instead):
            raise


def _is_ours(part: object) -> bool:
    cls = part if isinstance(part, type) else type(part)
    return cls.__module__.partition(".")[0] == _PACKAGE


def log_warning(text: str, is_shown: bool) -> None:
    """`is_shown`: it is printed elsewhere. A program without logging then need not print it again."""
    log = logging.getLogger("safetrain")
    if log.hasHandlers() or not is_shown:
        log.warning("%s", text)
