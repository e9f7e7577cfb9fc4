"""The training state, in memory and on disk. Checkpoints are written atomically and verified when they are loaded."""

from __future__ import annotations

from .group_store import open_store
from .manifest import Damaged
from .saver import Saver
from .store import BadState, CheckpointStore, Loaded

__all__ = ["BadState", "CheckpointStore", "Damaged", "Loaded", "Saver", "open_store"]
