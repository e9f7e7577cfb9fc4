"""The rules, one file per family. Importing this package fills the table."""

from . import comparisons, division, domains, exponentials, logarithms, losses, masks, precision, training_loop

__all__ = [
    "comparisons",
    "division",
    "domains",
    "exponentials",
    "logarithms",
    "losses",
    "masks",
    "precision",
    "training_loop",
]
