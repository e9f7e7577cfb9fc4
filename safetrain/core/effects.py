"""Options that have no effect together with others: an option given alone sets what it needs, a contradiction is an
error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fields import Field, show


@dataclass(frozen=True)
class Effects:
    implied: dict[str, Any]
    """Values of options that were not given, without which those that were given would do nothing."""
    problems: dict[str, str]
    """Options that were given and would do nothing, with what to do."""


def effects(fields: Mapping[str, Field], given: Mapping[str, Any]) -> Effects:
    """Of the options given for a section with these fields."""
    implied: dict[str, tuple[str, tuple[Any, ...]]] = {}
    problems: dict[str, str] = {}
    # A section with every option in it was written by safetrain, and its defaults are nobody's wish.
    wished = [n for n in given if n in fields and (len(given) < len(fields) or given[n] != fields[n].default)]
    for name in wished:
        for other, accepted in fields[name].metadata.get("only", {}).items():
            now = given.get(other, fields[other].default)
            if now in accepted:
                continue
            if other in given:
                problems[name] = (
                    f"has no effect with {other}: {show(now)}; set {other}: {accepted[0]}, or leave {name} out"
                )
            elif other in implied and not set(accepted) & set(implied[other][1]):
                first, for_first = implied[other]
                problems[name] = (
                    f"is for {other}: {accepted[0]}, and {first} for {other}: {for_first[0]}; keep one of them"
                )
            else:
                implied.setdefault(other, (name, accepted))
    for name in wished:  # one that its default already serves may contradict what another one implies
        for other, accepted in fields[name].metadata.get("only", {}).items():
            if other in implied and name not in problems and implied[other][1][0] not in accepted:
                first, for_first = implied[other]
                if name != first:
                    problems[name] = (
                        f"is for {other}: {accepted[0]}, and {first} for {other}: {for_first[0]}; keep one of them"
                    )
    values = {other: accepted[0] for other, (_, accepted) in implied.items()}
    for name, field in fields.items():
        if (limit := field.metadata.get("within")) is None:
            continue
        value, most = (given.get(n, fields[n].default) for n in (name, limit))
        if (name in given or limit in given) and _is_above(value, most):
            problems[limit if limit in given else name] = (
                f"{name} is {value} and {limit} is {most}, so {name} is never reached; set {name} to {most} at most"
            )
    for name in given:
        for other in fields[name].metadata.get("needs", ()) if name in fields else ():
            if given.get(other, fields[other].default) is None and name in wished:
                problems[name] = f"has no effect with {other}: null; set {other}, or leave {name} out"
    return Effects(values, problems)


def _is_above(value: Any, most: Any) -> bool:
    return isinstance(value, (int, float)) and isinstance(most, (int, float)) and value > most
