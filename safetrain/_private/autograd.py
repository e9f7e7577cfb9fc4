"""Traces every operation, forward and backward, through torch's dispatcher and autograd engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .feature import Feature

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:

        class TorchDispatchMode:
            """A base class. Check TRACING before entering it."""


NO_NUMBER = 1 << 62
"""Nodes that accumulate gradients are numbered above this; all other nodes count up from 0."""
PLAIN: tuple[type, ...] = (Tensor, nn.Parameter, nn.Buffer)
MODULE_CALL = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)
"""The function in whose frames `self` is the module that is called."""
ENGINE_CALL = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
"""The function that runs the autograd engine."""


def _probe() -> bool:
    """Traces x.exp() and its backward pass."""
    if MODULE_CALL is None or ENGINE_CALL is None:
        raise AttributeError("Module._call_impl or _engine_run_backward is not there, or not a function of Python")
    seen: list[tuple[str, int | None]] = []

    class Spy(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_op(func) and not any(has_own_dispatch(kind) for kind in (Tensor, nn.Parameter)):
                node = current_node()
                seen.append((op_schema(func).name, None if node is None else node_number(node)))
                with modes_off():
                    torch.zeros(1).exp()
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        x = torch.ones((), requires_grad=True)
        number = next_node_number()
        with Spy():  # type: ignore[no-untyped-call]
            y = x.exp()
            y.backward()  # type: ignore[no-untyped-call]
    ops = [name for name, _ in seen]
    is_numbered = node_number(y.grad_fn) == number and ("aten::exp", None) in seen and ("aten::mul", number) in seen
    return is_numbered and ops.count("aten::exp") == 1 and unwrapped(x) is x


TRACING = Feature(
    "tracing",
    relies_on="TorchDispatchMode, _disable_current_modes, _current_autograd_node, sequence numbers of autograd nodes, "
    "OpOverload._schema, Module._call_impl, _engine_run_backward",
    lost="the first bad operation of a step, its cause and the remedies; in `safetrain check`: what activations do",
    instead="a step that is not finite is refused all the same; its incident says that the cause is unknown, and why, and recovery "
    "acts as for any unknown cause",
    probe=_probe,
)


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
    off = getattr(_python_dispatch(), "_disable_current_modes", nullcontext)
    inside: AbstractContextManager[Any] = off()
    return inside


def is_op(func: Any) -> bool:
    """One operator for one set of argument types; not an operator of higher order, as flex attention is."""
    return isinstance(func, torch._ops.OpOverload)


def op_schema(func: Any) -> Any:
    """Names of an operator's arguments, and which of them it writes to."""
    return func._schema


def has_own_dispatch(kind: type) -> bool:
    """Whether tensors of this subclass take operations apart themselves."""
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not torch._C._disabled_torch_dispatch_impl


def unwrapped(tensor: Tensor) -> Tensor:
    """The first plain tensor inside wrapper subclasses (DTensor, nested tensors)."""
    is_wrapper = getattr(_python_dispatch(), "is_traceable_wrapper_subclass", lambda tensor: False)
    for _ in range(4):
        if type(tensor) in PLAIN or not is_wrapper(tensor):
            break
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        tensor = getattr(tensor, names[0])
    return tensor


def _python_dispatch() -> Any:
    import torch.utils._python_dispatch as module

    return module
