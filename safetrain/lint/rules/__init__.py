"""The rules, one file per family. Importing this package registers them."""

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
