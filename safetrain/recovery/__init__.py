"""Recovery from a refused step: a ladder of rungs, least invasive first."""

from .ladder import Ladder
from .last_good import LastGood
from .refused_step import RefusedStep, Resolution
from .repairs import Repairs
from .rungs import RUNGS, Rung

# Earlier names, kept for rungs of users.
Bench, Case, Settlement = Repairs, RefusedStep, Resolution

__all__ = ["RUNGS", "Bench", "Case", "Ladder", "LastGood", "RefusedStep", "Repairs", "Resolution", "Rung", "Settlement"]
