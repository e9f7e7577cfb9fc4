"""A change of the user's own source that keeps a bad step finite, proven by replaying the step with it.

rewriting.py   candidates for one line: a safe form of the operation, or of an argument of the call into a library
patching.py    runs a program as if its source had been changed
proposing.py   tries the candidates, and ranks those that work
"""

from __future__ import annotations

from .proposing import Proposal, propose

__all__ = ["Proposal", "propose"]
