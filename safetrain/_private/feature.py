"""A feature that relies on undocumented behaviour and may be missing in another version."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import UsageError

WITHOUT = "SAFETRAIN_WITHOUT"
"""Environment variable: names of features, separated by commas, that are not to be used although they would work."""

_turned_off = {name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip()}
_features: list[Feature] = []


@dataclass(eq=False)
class Feature:
    name: str
    relies_on: str
    lost: str
    """What there is not without it, for people."""
    instead: str
    """What happens then: a fallback, or an error at the start."""
    probe: Callable[[], object] = field(repr=False)
    """Tries it out; fails by raising or by returning False. Runs at the first use, maybe in the middle of a step: it must not
    draw random numbers."""

    def __post_init__(self) -> None:
        _features.append(self)

    @cached_property
    def works(self) -> bool:
        return not self.failure

    @cached_property
    def failure(self) -> str:
        """Why it cannot be used; empty when it can."""
        if self.name in _turned_off:
            return f"turned off by {WITHOUT}"
        try:
            with warnings.catch_warnings():  # of what torch imports
                warnings.simplefilter("ignore")
                return "it does not do what it did" if self.probe() is False else ""
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def require(self, to_fix: str) -> None:
        """Call it before training starts, of a feature without a fallback."""
        if not self.works:
            raise UsageError(f"{self.relies_on} cannot be used here: {self.failure}.\nTo fix: {to_fix}")

    def ask_again(self) -> None:
        self.__dict__.pop("works", None)
        self.__dict__.pop("failure", None)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """These features are missing inside, as with the environment variable."""
    before = set(_turned_off)
    _turned_off.update(names)
    try:
        _ask_all_again()
        yield
    finally:
        _turned_off.intersection_update(before)
        _ask_all_again()


def turned_off() -> frozenset[str]:
    return frozenset(_turned_off)


def _ask_all_again() -> None:
    for feature in _features:
        feature.ask_again()
