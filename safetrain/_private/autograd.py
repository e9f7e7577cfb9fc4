"""Every private API of torch that the forensics rely on, and nothing else. `missing()` names those that this torch lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NO_NUMBER = 1 << 62
"""Nodes that accumulate gradients are numbered above this; all other nodes count up from 0."""

_REQUIRED = {
    "torch._C._current_autograd_node": lambda: torch._C._current_autograd_node,
    "torch.autograd._get_sequence_nr": lambda: torch.autograd._get_sequence_nr,  # type: ignore[attr-defined]
    "torch.autograd.graph._engine_run_backward": lambda: torch.autograd.graph._engine_run_backward,
    "torch.utils._python_dispatch._disable_current_modes": lambda: _python_dispatch()._disable_current_modes,
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": lambda: (
        _python_dispatch().is_traceable_wrapper_subclass
    ),
    "torch.nn.Module._call_impl": lambda: nn.Module._call_impl,
    "torch.compiler.set_stance": lambda: torch.compiler.set_stance,
    "torch.UntypedStorage._cdata": lambda: torch.zeros(1).untyped_storage()._cdata,
    "torch.autograd.graph.Node._sequence_nr": lambda: _a_node()._sequence_nr,
}


def missing() -> list[str]:
    """The private names this torch does not have; empty when tracing works."""
    absent = []
    for name, get in _REQUIRED.items():
        try:
            get()  # type: ignore[no-untyped-call]
        except AttributeError:
            absent.append(name)
    return absent


def _python_dispatch() -> Any:
    import torch.utils._python_dispatch as module

    return module


def _a_node() -> Any:
    return torch.ones((), requires_grad=True).exp().grad_fn


def current_node() -> Any:
    """The autograd node whose backward is running on this thread, or None."""
    return torch._C._current_autograd_node()


def next_node_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_number(node: Any) -> int | None:
    number = int(node._sequence_nr())
    return number if number < NO_NUMBER else None


def modes_off() -> AbstractContextManager[Any]:
    """Ops inside are seen by no dispatch mode."""
    off: AbstractContextManager[Any] = _python_dispatch()._disable_current_modes()
    return off


def unwrapped(tensor: Tensor) -> Tensor:
    """The first plain tensor inside wrapper subclasses (DTensor, nested tensors)."""
    for _ in range(4):
        if type(tensor) in PLAIN or not _python_dispatch().is_traceable_wrapper_subclass(tensor):
            break
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        tensor = getattr(tensor, names[0])
    return tensor


PLAIN: tuple[type, ...] = (Tensor, nn.Parameter, nn.Buffer)
MODULE_CALL = nn.Module._call_impl.__code__
ENGINE_CALL = getattr(torch.autograd.graph._engine_run_backward, "__code__", None)


@contextmanager
def autocast_disabled() -> Iterator[None]:
    """Every autocast context entered inside, also by the model's own code, does nothing."""
    kind = torch.amp.autocast_mode.autocast
    enter = kind.__enter__

    def enter_disabled(context: Any) -> Any:
        context._enabled = False
        return enter(context)  # type: ignore[no-untyped-call]

    kind.__enter__ = enter_disabled  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__ = enter  # type: ignore[method-assign]
