"""Compiled models: what is called instead of the model, and in which precision `torch.compile` traces backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn

from .._private.compiler import BACKWARD, FullPrecisionBackward, is_compiled

_REPLAYING: WeakSet[nn.Module] = WeakSet()
_COMPILED: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def note_compiled(model: nn.Module, compiled: nn.Module, replays_graphs: bool = False) -> None:
    """`compiled`, which `torch.compile` made of the model, is called in its place from now on. `replays_graphs`: the next call
    overwrites what it has returned (CUDA graphs)."""
    _COMPILED[model] = ref(compiled)
    if replays_graphs:
        _REPLAYING.add(model)


def replays_graphs(model: nn.Module) -> bool:
    return model in _REPLAYING


def called_for(model: nn.Module) -> nn.Module:
    """The compiled model if there is one. Hooks that come and go belong there: those of the model itself are part of the graph,
    and each change of them would recompile it."""
    compiled = _COMPILED.get(model, ref(model))()
    return model if compiled is None else compiled


def lowers_islands(model: nn.Module) -> bool:
    """Whether the backward pass of a float32 island in this model would be computed in low precision, silently: it is compiled, by a
    torch that traces backward passes under autocast."""
    return not BACKWARD.works and (called_for(model) is not model or any(map(is_compiled, model.modules())))


def kept(loss: Tensor, metrics: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Loss and metrics that the next replay of a graph does not overwrite."""
    copies = {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in metrics.items()}
    return loss.clone(), copies


COMPILED_BACKWARD = FullPrecisionBackward()
"""Held while there is an island."""
