"""torch.compile: the original module of a compiled one, and the precision of compiled backward passes."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from .feature import Feature

_ORIGINAL = "_orig_mod"


def _probe_original() -> bool:
    import torch

    model = nn.Identity()  # no probe may draw a random number
    return torch.compile(model)._orig_mod is model  # type: ignore[attr-defined]  # compiles nothing yet


ORIGINAL = Feature(
    "compiled_module",
    relies_on="torch._dynamo.OptimizedModule._orig_mod",
    lost="incidents name the modules of a model that you compiled yourself by the names they have in the model",
    instead="the compiled model is replayed eagerly as it is, and names in it begin with what torch calls the module inside",
    probe=_probe_original,
)


def _probe_backward() -> bool:
    import torch._functorch.config as config

    return hasattr(config, "backward_pass_autocast")


BACKWARD = Feature(
    "compiled_backward",
    relies_on="torch._functorch.config.backward_pass_autocast (torch 2.8 does not have it yet)",
    lost="float32 islands in the backward pass of a compiled model",
    instead="a compiled backward pass computes in the precision of autocast, in islands too",
    probe=_probe_backward,
)


def is_in_use() -> bool:
    """Whether anything may have been compiled in this process. Importing the compiler to ask it takes a second."""
    return "torch._dynamo" in sys.modules


def is_compiled(model: nn.Module) -> bool:
    return is_in_use() and isinstance(getattr(model, _ORIGINAL, None), nn.Module)


def original(model: nn.Module) -> nn.Module:
    """What `torch.compile` was given to make this model; the model itself if it is not compiled."""
    return getattr(model, _ORIGINAL) if is_compiled(model) and ORIGINAL.works else model


class FullPrecisionBackward:
    """While anybody holds it, torch.compile traces backward passes without autocast, as they run without compile.

    Otherwise the backward of a float32 island would be computed in low precision.
    """

    def __init__(self) -> None:
        self._num_holders = 0
        self._before: Any = None

    def hold(self) -> None:
        self._num_holders += 1
        if self._num_holders == 1 and BACKWARD.works:
            import torch._functorch.config as config

            self._before, config.backward_pass_autocast = config.backward_pass_autocast, "off"

    def let_go(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0 and self._before is not None:
            import torch._functorch.config as config

            config.backward_pass_autocast, self._before = self._before, None
