"""Pre-flight: what can be known to be wrong before the first step, found in seconds, with nothing changed."""

from __future__ import annotations

from .outcome import FAIL, PASS, SKIP, WARN, Outcome
from .registry import CHECKS
from .report import Checked, CheckReport
from .runner import check

__all__ = ["CHECKS", "FAIL", "PASS", "SKIP", "WARN", "CheckReport", "Checked", "Outcome", "check"]
