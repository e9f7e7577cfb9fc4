"""Untrusted text: shown without control codes; source files are read within limits."""

from __future__ import annotations

import linecache
import os
import stat
import sys

MAX_SOURCE = 2**23


def printable(text: str) -> str:
    """Control characters, which a terminal would act on, are shown as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def prints_to_terminal() -> bool:
    """Standard output is a terminal. It may also be closed, missing, or an object that knows only `write`."""
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except (AttributeError, ValueError, OSError):
        return False


def source_of_file(file: str) -> list[str]:
    """Lines of a Python file that an incident names; none of a file that is no source, or that does not belong to what is running here.

    An incident may come from anywhere and name any file, and what is around its line would be quoted in a report.
    """
    if file in linecache.cache and not os.path.exists(file):  # a cell of a notebook
        return linecache.getlines(file)
    try:
        about = os.stat(file)
    except (OSError, ValueError):
        return []
    if not (stat.S_ISREG(about.st_mode) and about.st_size <= MAX_SOURCE and file.endswith(".py")):
        return []
    if not (_is_below_current_directory(file) or _is_imported(file) or "site-packages" in file):
        return []
    linecache.checkcache(file)
    return linecache.getlines(file)


def _is_below_current_directory(file: str) -> bool:
    try:
        current = os.path.realpath(os.getcwd())
    except OSError:  # it is gone
        return False
    return os.path.realpath(file).startswith(current.rstrip(os.sep) + os.sep)


def _is_imported(file: str) -> bool:
    path = os.path.abspath(file)
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return any(each is not None and os.path.abspath(each) == path for each in files)
