"""Where the fatal value came from: back from the bad operand, through the operations that made it, to the batch, a parameter, a
constant or a cancellation.

recording.py    one more replay, in which the operations behind the bad one keep their values
dependence.py   which elements of its operands an element of a result depends on
walk.py         which of them to follow, and where to stop
spots.py        some elements of a tensor: where they lie in memory, and how to name them
"""

from __future__ import annotations

from .walk import lineage_of

__all__ = ["lineage_of"]
