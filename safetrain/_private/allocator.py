"""Keeps the memory that a step frees for the next step.

The C library of most Linux systems gives freed memory back to the system, and the next step asks for it again: every page of it
is then a page fault. In a step of a small ResNet on a CPU those are 1,500, and a fifth of its time. The setting is one of the
whole process, so the commands turn it on and the library does not.
"""

from __future__ import annotations

import ctypes
import os

from .feature import Feature

MOST_KEPT = 2**30
"""Bytes that the process holds on to; it had all of them in use before."""
MAPPED_FROM = 2**25
"""Bytes from which a piece of memory is given back all the same. The library gets there by itself, if slowly."""
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables that say the same to the C library."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


def _probe() -> bool:
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""  # another system does not know the name, or has no confstr
    return version.startswith("glibc") and ctypes.CDLL(None).mallopt is not None


KEEP_MEMORY = Feature(
    "keep_memory",
    relies_on="mallopt of glibc, Linux's usual C library",
    lost="up to a fifth of the time of a step on a CPU (loop.keep_memory)",
    instead="freed memory goes back to the system, as usual",
    probe=_probe,
)


def keep_freed_memory() -> bool:
    """For all of the process and for good: there is no way to ask what was in force before. False: this system is another, or
    it is set in the environment already."""
    if any(name in os.environ for name in SETTINGS) or not KEEP_MEMORY.works:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED_FROM) and mallopt(_TRIM_THRESHOLD, MOST_KEPT))
