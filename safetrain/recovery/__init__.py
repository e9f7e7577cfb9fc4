"""What is done about a refused step: a ladder of rungs, least invasive first. Policy here, mechanism in the trainer."""

from .case import Bench, Case, LastGood, Settlement
from .ladder import Ladder
from .rungs import RUNGS, Rung

__all__ = ["RUNGS", "Bench", "Case", "Ladder", "LastGood", "Rung", "Settlement"]
