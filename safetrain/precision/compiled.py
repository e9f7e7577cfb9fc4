"""Compiled models: what is called instead of the model, and in which precision `torch.compile` traces backward."""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

from torch import nn

from .._private.compiler import FullPrecisionBackward

_COMPILED: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def note_compiled(model: nn.Module, compiled: nn.Module) -> None:
    """`compiled`, which `torch.compile` made of the model, is called in its place from now on."""
    _COMPILED[model] = ref(compiled)


def called_for(model: nn.Module) -> nn.Module:
    """The compiled model if there is one. Hooks that come and go belong there: those of the model itself are part of the graph,
    and each change of them would recompile it."""
    compiled = _COMPILED.get(model, ref(model))()
    return model if compiled is None else compiled


COMPILED_BACKWARD = FullPrecisionBackward()
"""Held while there is an island."""
