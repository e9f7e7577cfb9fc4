"""What a check is, and the decorator that makes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .outcome import Outcome
from .subject import Subject


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Subject], Outcome]
    looks_at: str
    fails: str
    """When it fails; empty if it never does."""
    warns: str
    """When it warns; empty if it never does."""
    fix: str


def preflight_check(
    *, looks_at: str, fix: str, fails: str = "", warns: str = ""
) -> Callable[[Callable[[Subject], Outcome]], Check]:
    """Makes a check of a function in a module of `checks`, with the function's name. The texts are its row in docs/check.md."""
    return lambda function: Check(function.__name__, function, looks_at, fails, warns, fix)
