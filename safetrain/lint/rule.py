"""What a rule is, and the registry of all rules."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .context import Context
from .events import Event, Routine
from .value import Value

ValueCheck = Callable[[Value, Context], "str | None"]
RoutineCheck = Callable[[Routine], Iterator[tuple[Event, str]]]


@dataclass(frozen=True)
class Rule:
    """One pattern that leads to NaN. The texts are shown with a finding, and are its section of docs/lint.md.

    >>> RULES["ST101"].title
    'log of softmax or sigmoid'
    """

    code: str
    title: str
    why: str
    safe: str
    """The form to write instead, in a sentence."""
    bad: str
    good: str
    on: tuple[str, ...] = ()
    """Operations that `check` is called for."""
    check: ValueCheck | None = None
    check_routine: RoutineCheck | None = None


RULES: dict[str, Rule] = {}
"""Every rule by its code."""
BY_OPERATION: dict[str, list[Rule]] = {}


def value_rule(
    code: str, title: str, *, on: tuple[str, ...], why: str, safe: str, bad: str, good: str
) -> Callable[[ValueCheck], ValueCheck]:
    """Registers a function that checks one operation; it returns what is wrong, or None."""

    def register(check: ValueCheck) -> ValueCheck:
        rule = _add(Rule(code, title, _text(why), _text(safe), _code(bad), _code(good), on, check=check))
        for op in on:
            BY_OPERATION.setdefault(op, []).append(rule)
        return check

    return register


def routine_rule(
    code: str, title: str, *, why: str, safe: str, bad: str, good: str
) -> Callable[[RoutineCheck], RoutineCheck]:
    """Registers a function that checks the training-loop calls of one function; it yields calls and what is wrong."""

    def register(check: RoutineCheck) -> RoutineCheck:
        _add(Rule(code, title, _text(why), _text(safe), _code(bad), _code(good), check_routine=check))
        return check

    return register


def _add(rule: Rule) -> Rule:
    assert rule.code not in RULES, f"{rule.code} is taken"
    RULES[rule.code] = rule
    return rule


def _text(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    return textwrap.dedent(text).strip() + "\n"
