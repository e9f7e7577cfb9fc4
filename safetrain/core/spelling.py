"""Suggests the right name for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def suggest(name: Any, known: Iterable[Any], what: str = "accepted", limit: int = 40) -> str:
    """`, did you mean 'x'?` if a known name is close, else the list of known names."""
    names = [str(candidate) for candidate in known]
    # Wrong capitals are the likeliest slip: `Adamw` means `AdamW`, although `Adam` is as close.
    close = [n for n in names if n.lower() == str(name).lower()] or difflib.get_close_matches(str(name), names, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    if not names:
        return f"; none are {what}"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"; {what}: {', '.join(names[:limit])}{more}"
