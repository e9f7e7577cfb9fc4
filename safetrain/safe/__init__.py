"""Drop-in operations whose values and gradients stay finite at their singularities.

    from safetrain import safe
    angle = safe.acos(safe.cosine_similarity(a, b))

All of them:

- Away from the singularity they are bit-identical to torch's operation, also in the gradient.
- At the singularity the value is the documented one and the gradient is zero, also the second derivative. Finite
  input gives finite values and gradients, except where a norm, a sum or a mean is itself too large for the dtype.
- They change results for *finite* input only and never hide bad input: NaN gives NaN, and ±Inf gives what torch's operation
  gives. (The exception is -Inf in softmax and log_softmax, where it is the usual way to write a mask.)
- Limits come from the dtype of the tensor, so float16, bfloat16, float32 and float64 all work, also under autocast.
  Integers become floats, as in torch.
- No device synchronisation and no branches on values, so compile, vmap and double backward work. The checks do synchronise.

`docs/safe.md` has the table of values and gradients.
"""

from __future__ import annotations

import importlib
from typing import Any

from .checks import GradientProblem, check_gradients, check_tensor
from .elementwise import acos, asin, atanh, div, exp, log, pow, sqrt
from .probabilities import bce, log_softmax, softmax
from .reductions import cosine_similarity, masked_mean, norm, normalize, std

__all__ = [
    "GradientProblem",
    "acos",
    "asin",
    "atanh",
    "bce",
    "check_gradients",
    "check_tensor",
    "cosine_similarity",
    "div",
    "exp",
    "find_bad_batches",
    "log",
    "log_softmax",
    "masked_mean",
    "norm",
    "normalize",
    "pow",
    "softmax",
    "sqrt",
    "std",
]


def __getattr__(name: str) -> Any:
    # Forensics imports the functions above, so it is imported lazily.
    if name == "find_bad_batches":
        return importlib.import_module("safetrain.forensics.scan").find_bad_batches
    raise AttributeError(f"module 'safetrain.safe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
