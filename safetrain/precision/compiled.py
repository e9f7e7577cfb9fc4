"""Compiled models: what is called instead of the model, and in which precision `torch.compile` traces backward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

_COMPILED: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def note_compiled(model: nn.Module, compiled: nn.Module) -> None:
    """`compiled`, which `torch.compile` made of the model, is called in its place from now on."""
    _COMPILED[model] = ref(compiled)


def called_for(model: nn.Module) -> nn.Module:
    """The compiled model if there is one. Hooks that come and go belong there: those of the model itself are part of the graph,
    and each change of them would recompile it."""
    compiled = _COMPILED.get(model, ref(model))()
    return model if compiled is None else compiled


class _BackwardPrecision:
    """While there is an island, torch.compile traces backward passes without autocast, as they run without compile.

    Otherwise the backward of an island would be computed in low precision.
    """

    def __init__(self) -> None:
        self._num_islands = 0
        self._before: Any = None

    def hold(self) -> None:
        import torch._functorch.config as config

        self._num_islands += 1
        if self._num_islands == 1 and hasattr(config, "backward_pass_autocast"):  # torch 2.6 does not have it yet
            self._before, config.backward_pass_autocast = config.backward_pass_autocast, "off"

    def let_go(self) -> None:
        import torch._functorch.config as config

        self._num_islands -= 1
        if self._num_islands == 0 and self._before is not None:
            config.backward_pass_autocast, self._before = self._before, None


COMPILED_BACKWARD = _BackwardPrecision()
