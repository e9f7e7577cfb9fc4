"""Changes of the user's own source, tried on the replay of a bad step.

rewriting.py   candidates for one line: a safe form of the operation, or of an argument of the call into a library
patching.py    runs a program as if its source had been changed
bench.py       the bad step and a healthy one with a change: which changes are proven
"""

from __future__ import annotations

from .bench import CLOSE, IDENTICAL, Bench, Change
from .rewriting import Candidate, candidates

__all__ = ["CLOSE", "IDENTICAL", "Bench", "Candidate", "Change", "candidates"]
