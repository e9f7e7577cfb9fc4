"""Finds a change of the user's own source that keeps a bad step finite, proven by replaying the step with it."""

from __future__ import annotations

from .proposal import Proposal
from .proposing import propose

__all__ = ["Proposal", "propose"]
