"""fp32 islands: modules that compute in float32, forward and backward, while the rest runs under autocast.

An island is a bound method in the instance's `__dict__` that takes the place of the class's `forward`. State-dict keys,
hooks and types stay as they are; a deepcopy is an island of its own, with its own weights; torch.compile sees one graph;
DDP may wrap the model before or after. It works without the trainer:

    remove = island(model.blocks[3].mlp)
    with islands.autocast(model, "cpu", torch.bfloat16):
        loss = loss_fn(model, batch)
    remove()

The loss is an island in reverse: autocast is open only inside the model's own forward, whose outputs are cast to float32.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import UsageError
from ..tensors.nest import map_tensors
from .autocast import LOW_PRECISION
from .compiled import COMPILED_BACKWARD

LOSS = "loss"
"""The name of the island that is everything outside the model."""

# Keys in an instance's __dict__. How many asked for the module, or the loss around it, to be an island:
_ISLAND, _LOSS_ISLAND = "_num_fp32_island", "_num_fp32_loss"
# The forward that the instance had of its own, and the autocast that the model itself is to open:
_OWN_FORWARD, _AUTOCAST = "_forward_outside_island", "_autocast_inside_model"


def island(module: nn.Module) -> Callable[[], None]:
    """Make a module, with all that it calls, an island; returns what undoes it. Asked for twice, it has to be undone twice."""
    low = next((p.dtype for p in module.parameters() if p.dtype in LOW_PRECISION), None)
    if low is not None:
        raise UsageError(
            f"{type(module).__name__} has parameters in {str(low).removeprefix('torch.')}, so it cannot be a float32 island.\n"
            "To fix: keep the model in float32 and let loop.precision choose the arithmetic."
        )
    return _ask(module, _ISLAND)


@contextmanager
def kept_in_fp32(module: nn.Module) -> Iterator[None]:
    """The module is an island inside the context."""
    remove = island(module)
    try:
        yield
    finally:
        remove()


def loss_island(model: nn.Module) -> Callable[[], None]:
    """Keep everything outside the model's forward in float32; returns what undoes it. Holds inside `autocast(model, …)`."""
    return _ask(model, _LOSS_ISLAND)


def islands_of(model: nn.Module) -> list[str]:
    """Names of the modules that are islands now, and `loss` last if the loss is one."""
    names = [name for name, module in model.named_modules() if _is(module, _ISLAND)]
    return [*names, LOSS] if _is(model, _LOSS_ISLAND) else names


def autocast(model: nn.Module | None, device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast for a step of `model`, around all of it or, if the loss is an island, around the model's forward only."""
    if dtype is None:
        return nullcontext()
    if model is not None and _is(model, _LOSS_ISLAND):
        return _autocast_inside(model, device_type, dtype)
    return torch.autocast(device_type, dtype=dtype)


@contextmanager
def _autocast_inside(model: nn.Module, device_type: str, dtype: torch.dtype) -> Iterator[None]:
    outer = model.__dict__.get(_AUTOCAST)
    model.__dict__[_AUTOCAST] = (device_type, dtype)
    try:
        yield
    finally:
        model.__dict__[_AUTOCAST] = outer


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of an instance while it is an island.

    It is called `forward` because pickle stores a bound method by its name: a pickled model then loads as a plain one.
    """
    own = self.__dict__.get(_OWN_FORWARD)
    if self.__dict__.get(_ISLAND):
        args, kwargs = _to_fp32(args), _to_fp32(kwargs)
        with torch.autocast(_device_type(self, args, kwargs), enabled=False):
            return type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
    inside = self.__dict__.get(_AUTOCAST)
    if inside is None:
        return type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
    with torch.autocast(inside[0], dtype=inside[1]):
        outputs = type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
    return _to_fp32(outputs)


def _to_fp32(nest: Any) -> Any:
    def widened(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, PackedSequence)):
            dtype = leaf.data.dtype if isinstance(leaf, PackedSequence) else leaf.dtype
            return leaf.float() if dtype in LOW_PRECISION else leaf
        return leaf

    return map_tensors(nest, widened)


def _device_type(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


# ---- putting it on and taking it off -------------------------------------------------------------------------------


def _ask(module: nn.Module, key: str) -> Callable[[], None]:
    own = module.__dict__
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError("a scripted module cannot be a float32 island.\nTo fix: use the module it was made from.")
    if not _is_installed(module):
        for left_over in (_ISLAND, _LOSS_ISLAND):  # of an island that was pickled
            own.pop(left_over, None)
        if "forward" in own:
            own[_OWN_FORWARD] = own["forward"]
        own["forward"] = types.MethodType(forward, module)
        COMPILED_BACKWARD.hold()
    own[key] = own.get(key, 0) + 1
    asked = True

    def remove() -> None:
        nonlocal asked
        if asked:
            asked = False
            _release(module, key)

    return remove


def _release(module: nn.Module, key: str) -> None:
    own = module.__dict__
    own[key] -= 1
    if not own[key]:
        del own[key]
    if _ISLAND in own or _LOSS_ISLAND in own:
        return
    del own["forward"]
    own.pop(_AUTOCAST, None)
    if _OWN_FORWARD in own:
        own["forward"] = own.pop(_OWN_FORWARD)
    COMPILED_BACKWARD.let_go()


def _is_installed(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _is(module: nn.Module, kind: str) -> bool:
    return _is_installed(module) and kind in module.__dict__
