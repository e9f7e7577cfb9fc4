"""Each time the host waits for the device, with the line of the program that made it wait."""

import collections
import contextlib
import sys

from . import copies
from .state import KNOBS

WAITS = collections.Counter()
"""(what, file:line): a number read, a copy that blocks, an operation whose result has a size that the host must know."""
_HERE = __file__.rpartition("/")[0]


def wait(what, counts=True):
    """The host waits: what was on its way arrives, and a failure of the device is noticed."""
    KNOBS.check_alive(is_wait=True)
    copies.deliver()
    if counts:
        frame = sys._getframe(1)
        while frame.f_back and (frame.f_code.co_filename.startswith(_HERE) or "/torch/" in frame.f_code.co_filename):
            frame = frame.f_back
        WAITS[what, f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1


@contextlib.contextmanager
def counted():
    """A counter of the waits inside."""
    before, inside = WAITS.copy(), collections.Counter()
    yield inside
    inside.update(WAITS - before)
