"""What a rule is, and the table of all rules."""

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
    """One pattern that goes NaN later. The texts are shown with a finding, and make up its section in the documentation.

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
    """Operations whose every use is shown to `check`."""
    check: ValueCheck | None = None
    check_routine: RoutineCheck | None = None


RULES: dict[str, Rule] = {}
"""Every rule by its code."""
BY_OPERATION: dict[str, list[Rule]] = {}


def value_rule(
    code: str, title: str, *, on: tuple[str, ...], why: str, safe: str, bad: str, good: str
) -> Callable[[ValueCheck], ValueCheck]:
    """Registers a function that looks at one operation, and returns what is wrong with it or None."""

    def register(check: ValueCheck) -> ValueCheck:
        rule = _add(Rule(code, title, _text(why), _text(safe), _code(bad), _code(good), on, check=check))
        for op in on:
            BY_OPERATION.setdefault(op, []).append(rule)
        return check

    return register


def routine_rule(
    code: str, title: str, *, why: str, safe: str, bad: str, good: str
) -> Callable[[RoutineCheck], RoutineCheck]:
    """Registers a function that looks at the training-loop calls of one function, and yields what is wrong where."""

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
