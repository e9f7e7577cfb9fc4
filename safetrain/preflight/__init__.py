"""Pre-flight checks: find what is wrong with data, model and config before the first step, in seconds, changing nothing."""

from __future__ import annotations

from .checks import CHECKS
from .outcome import FAIL, PASS, SKIP, WARN, Outcome
from .report import Checked, CheckReport
from .runner import check

__all__ = ["CHECKS", "FAIL", "PASS", "SKIP", "WARN", "CheckReport", "Checked", "Outcome", "check"]
