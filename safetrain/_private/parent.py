"""Sends this process a signal when its parent process ends."""

from __future__ import annotations

import ctypes
import signal
import sys

from .feature import Feature

_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""
_PR_GET_PDEATHSIG = 2


def _probe() -> bool:
    present = ctypes.c_int()
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(present)) == 0)


PARENT = Feature(
    "parent_signal",
    relies_on="prctl of Linux",
    lost="a process whose launcher was killed ends at once, with its state saved",
    instead="it ends when it waits for another rank for too long (loop.rank_timeout_seconds), or when it is done",
    probe=_probe,
)


def signal_when_parent_ends(number: signal.Signals) -> bool:
    """False: there will be none."""
    return PARENT.works and bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0)
