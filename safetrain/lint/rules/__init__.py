"""The rules, one file per family. Importing this package registers them."""

from . import (  # noqa: F401
    comparisons,
    division,
    domains,
    exponentials,
    logarithms,
    losses,
    masks,
    precision,
    training_loop,
)
