"""The guards that are open in this process."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

if TYPE_CHECKING:
    from .guard import LoopGuard

open_guards: weakref.WeakSet[LoopGuard] = weakref.WeakSet()


def close_those_of(optimizers: Sequence[Optimizer]) -> bool:
    """Close the guards that watch one of these; whether there were any. A cell of a notebook that is run again makes a second one."""
    own = {id(optimizer) for optimizer in optimizers}
    found = [guard for guard in open_guards if own & {id(optimizer) for optimizer in guard.optimizers}]
    for guard in found:
        guard.close()
    return bool(found)


@atexit.register
def _close_all() -> None:
    """A loop that forgets to close its guard still gets its summary; one that raised, with that."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for guard in list(open_guards):
        guard.ended(error)
