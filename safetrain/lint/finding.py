"""One match of a rule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Finding:
    """One match of a rule in one place.

    >>> print(check_source("import torch\\nloss = torch.log(torch.softmax(x, -1))", "train.py")[0].render())
    train.py:2:8: ST101 log of softmax
        why: ...
        safe: ...
    """

    path: str
    line: int
    column: int
    """Counted from 1, like the line."""
    code: str
    message: str
    why: str = ""
    safe: str = ""
    """The form to write instead."""

    def render(self) -> str:
        lines = [f"{self.path}:{self.line}:{self.column}: {self.code} {self.message}"]
        lines += [f"    {label}: {text}" for label, text in (("why", self.why), ("safe", self.safe)) if text]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
