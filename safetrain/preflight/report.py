"""The outcomes of all checks, rendered for a terminal or as a dict."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..core.text import printable
from .outcome import FAIL, PASS, SKIP, WARN, Outcome

COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red", SKIP: "bright_black"}


@dataclass(frozen=True, kw_only=True)
class Checked(Outcome):
    """The outcome of one check, with its name and its time."""

    name: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "fix": self.fix,
            "numbers": self.numbers,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class CheckReport:
    """What `safetrain.check` returns. True in a condition if nothing failed.

    >>> trainer = SafeTrainer(torch.nn.Linear(3, 1), loss_fn=torch.nn.MSELoss(), train_data=data, config=QUIET)
    >>> report = trainer.check(only=["weights_finite", "padding"])
    >>> report.counts
    {'PASS': 1, 'WARN': 0, 'FAIL': 0, 'SKIP': 1}
    """

    name: str
    checks: list[Checked] = field(default_factory=list)
    seconds: float = 0.0
    budget: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing failed; there may be warnings."""
        return not any(checked.status == FAIL for checked in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __getitem__(self, name: str) -> Checked:
        """The outcome of one check by its name."""
        for checked in self.checks:
            if checked.name == name:
                return checked
        raise KeyError(name)

    def with_status(self, status: str) -> list[Checked]:
        """The checks with this status: PASS, WARN, FAIL or SKIP."""
        return [checked for checked in self.checks if checked.status == status]

    @property
    def counts(self) -> dict[str, int]:
        """The number of checks per status."""
        found = Counter(checked.status for checked in self.checks)
        return {status: found[status] for status in (PASS, WARN, FAIL, SKIP)}

    def to_dict(self) -> dict[str, Any]:
        """For a program, as `safetrain check --json` prints it."""
        return {
            "schema": 1,
            "name": self.name,
            "passed": self.passed,
            "counts": self.counts,
            "seconds": round(self.seconds, 3),
            "budget": self.budget,
            "checks": [checked.to_dict() for checked in self.checks],
        }

    def summary(self) -> str:
        """One line: how many passed, failed, were skipped, and how long it took."""
        counts = self.counts
        parts = [f"{counts[PASS]} passed"]
        parts += [f"{counts[status]} {word}" for status, word in _WORDS if counts[status]]
        return f"{self.name}: {', '.join(parts)} in {self.seconds:.1f} s"

    def render(self, width: int | None = None) -> str:
        """Plain text, one line per check; its fix, where there is one, below it."""
        lines = [line for checked in self.checks for line in render_one(checked, self._name_width, width)]
        return "\n".join([*lines, self.summary()])

    @property
    def _name_width(self) -> int:
        return max((len(checked.name) for checked in self.checks), default=0)

    def __str__(self) -> str:
        return self.render()


_WORDS = ((WARN, "to look at"), (FAIL, "failed"), (SKIP, "skipped"))


def render_one(checked: Checked, name_width: int, width: int | None = None) -> list[str]:
    """`STATUS name  reason`, and its fix below the reason; wrapped there to `width` columns, if one is given."""
    indent = 4 + 2 + name_width + 2
    paragraphs = [checked.reason] + ([f"fix: {checked.fix}"] if checked.fix else [])
    lines = []
    for number, paragraph in enumerate(paragraphs):
        text = printable(" ".join(paragraph.split()))
        wrapped = [text] if width is None else _wrapped(text, max(width - indent, 30))
        head = f"{checked.status:<4}  {checked.name:<{name_width}}  " if number == 0 else " " * indent
        lines += [head + wrapped[0], *(" " * indent + line for line in wrapped[1:])]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
