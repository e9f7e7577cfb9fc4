"""What a rule is, and the registry of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .context import Context
from .events import Event, Routine
from .value import Value

ValueCheck = Callable[[Value, Context], "str | None"]
RoutineCheck = Callable[[Routine], Iterator[tuple[Event, str]]]


@dataclass(frozen=True)
class Rule:
    """One pattern that leads to NaN. The texts are shown with a finding; docs/lint.md has them with an example of each form.

    >>> RULES["ST101"].title
    'log of softmax or sigmoid'
    """

    code: str
    title: str
    why: str
    safe: str
    """The form to write instead, in a sentence."""
    on: tuple[str, ...] = ()
    """Operations that `check` is called for."""
    check: ValueCheck | None = None
    check_routine: RoutineCheck | None = None


RULES: dict[str, Rule] = {}
"""Every rule by its code."""
BY_OPERATION: dict[str, list[Rule]] = {}


def value_rule(
    code: str, title: str, *, on: tuple[str, ...], why: str, safe: str
) -> Callable[[ValueCheck], ValueCheck]:
    """Registers a function that checks one operation; it returns what is wrong, or None."""

    def register(check: ValueCheck) -> ValueCheck:
        rule = _add(Rule(code, title, why, safe, on, check=check))
        for op in on:
            BY_OPERATION.setdefault(op, []).append(rule)
        return check

    return register


def routine_rule(code: str, title: str, *, why: str, safe: str) -> Callable[[RoutineCheck], RoutineCheck]:
    """Registers a function that checks the training-loop calls of one function; it yields calls and what is wrong."""

    def register(check: RoutineCheck) -> RoutineCheck:
        _add(Rule(code, title, why, safe, check_routine=check))
        return check

    return register


def _add(rule: Rule) -> Rule:
    assert rule.code not in RULES, f"{rule.code} is taken"
    RULES[rule.code] = rule
    return rule
