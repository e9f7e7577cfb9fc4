"""A device that is not the CPU, in pure Python, for a test suite on machines without an accelerator.

Its tensors are CPU memory under another label: a DLPack capsule does not care what its device field says. Every operation is run on the
CPU by one fallback (`operations.py`). It has its own random numbers and memory accounting (`memory.py`), refuses mixed devices, counts
every wait of the host with its line (`waits.py`), and can be told to deliver copies late, to run out of memory, to fail for good on an
index out of range, and to add noise in the last bit (`KNOBS`).

It cannot be taken back once it is installed: use it in a process of its own.
"""

from .memory import LEDGER
from .module import NAME, install
from .state import KNOBS
from .waits import WAITS, counted

__all__ = ["KNOBS", "LEDGER", "NAME", "WAITS", "counted", "install"]
