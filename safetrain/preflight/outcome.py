"""The result of a check: its status, the reason, the numbers measured, and a fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASS, WARN, FAIL, SKIP = "PASS", "WARN", "FAIL", "SKIP"


@dataclass(frozen=True)
class Outcome:
    status: str
    """PASS, WARN (worth a look, may be intended), FAIL (the training will not work as it is) or SKIP (could not be checked)."""
    reason: str
    fix: str = ""
    """What to change; there is one whenever the status is WARN or FAIL."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was measured, as JSON types. NaN and Inf are allowed."""


class Unavailable(Exception):
    """Raised when a check cannot be made; it is skipped with this message as the reason."""


def passed(reason: str, **numbers: Any) -> Outcome:
    return Outcome(PASS, reason, "", numbers)


def warned(reason: str, fix: str, **numbers: Any) -> Outcome:
    return Outcome(WARN, reason, fix, numbers)


def failed(reason: str, fix: str, **numbers: Any) -> Outcome:
    return Outcome(FAIL, reason, fix, numbers)


def graded(is_failure: bool, reason: str, fix: str, **numbers: Any) -> Outcome:
    return Outcome(FAIL if is_failure else WARN, reason, fix, numbers)


def skipped(reason: str) -> Outcome:
    return Outcome(SKIP, reason)


class Problems(list[Outcome]):
    """What a check has found so far."""

    def warn(self, reason: str, fix: str, **numbers: Any) -> None:
        self.append(warned(reason, fix, **numbers))

    def fail(self, reason: str, fix: str, **numbers: Any) -> None:
        self.append(failed(reason, fix, **numbers))

    def add(self, is_failure: bool, reason: str, fix: str, **numbers: Any) -> None:
        self.append(graded(is_failure, reason, fix, **numbers))


def worst(outcomes: list[Outcome], otherwise: Outcome) -> Outcome:
    """One outcome of several findings: the most severe status and its fix, the reasons of up to three."""
    if not outcomes:
        return otherwise
    ranked = sorted(outcomes, key=lambda outcome: (FAIL, WARN).index(outcome.status))
    numbers = {key: value for outcome in reversed(ranked) for key, value in outcome.numbers.items()}
    reason = "; ".join(outcome.reason for outcome in ranked[:3])
    return Outcome(ranked[0].status, reason, ranked[0].fix, otherwise.numbers | numbers)
