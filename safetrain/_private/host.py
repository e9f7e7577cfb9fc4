"""Observes the user's own loop: its calls of backward and of its loss scaler.

`Tensor.backward` looks `torch.autograd.backward` up at each call, and a `GradScaler` finds its methods on its class, so both can
be listened to as long as a guard is open, whoever calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .feature import Feature


class Listener(Protocol):
    def on_backward(self, losses: Any) -> None:
        """Before a backward pass from these tensors."""

    def on_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None:
        """A loss was multiplied by the loss scale."""

    def owns(self, optimizer: Any) -> bool:
        """Whether `scaler.step(optimizer)` is to be decided by `on_scaler_step`."""

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, proceed: Callable[[], Any]) -> Any: ...

    def keeps_scale(self, scaler: GradScaler) -> bool:
        """Whether `scaler.update()` is to forget the step, and leave the scale as it is."""


_listeners: list[Listener] = []
_uninstall: list[Callable[[], None]] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Returns what ends it. Of several listeners the newest is asked first."""
    if not _listeners:
        _install()
    _listeners.append(listener)

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
            if not _listeners:
                while _uninstall:
                    _uninstall.pop()()

    return remove


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    before = getattr(owner, name)
    ours = functools.wraps(before)(make(before))
    setattr(owner, name, ours)

    def restore() -> None:
        if (
            getattr(owner, name) is ours
        ):  # else other code has wrapped it since: it goes on calling ours, which listens to none
            setattr(owner, name, before)

    _uninstall.append(restore)


def _install() -> None:
    def backward(original: Any) -> Any:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for listener in reversed(_listeners):
                listener.on_backward(tensors)
            return original(tensors, *args, **kwargs)

        return call

    def scale(original: Any) -> Any:
        def call(self: GradScaler, outputs: Any) -> Any:
            scaled = original(self, outputs)
            if isinstance(outputs, Tensor) and self.is_enabled():
                for listener in reversed(_listeners):
                    listener.on_scaled(self, outputs, scaled)
            return scaled

        return call

    def step(original: Any) -> Any:
        def call(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            proceed = functools.partial(original, self, optimizer, *args, **kwargs)
            for listener in reversed(_listeners):
                if self.is_enabled() and listener.owns(optimizer):
                    return listener.on_scaler_step(self, optimizer, proceed)
            return proceed()

        return call

    def update(original: Any) -> Any:
        def call(self: GradScaler, new_scale: Any = None) -> Any:
            for listener in _listeners:
                if listener.keeps_scale(self):
                    new_scale = self.get_scale()
            return original(self, new_scale)

        return call

    _replace(torch.autograd, "backward", backward)
    _replace(GradScaler, "scale", scale)
    _replace(GradScaler, "step", step)
    _replace(GradScaler, "update", update)


def scalar_factor(loss: Tensor) -> tuple[float, Any]:
    """By what number a loss was multiplied last (`loss / 4` is 0.25 times the loss), and the node in the graph of the loss itself."""
    node, factor = loss.grad_fn, 1.0
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        inner = [each for each, _ in node.next_functions if each is not None]
        other = getattr(node, "_saved_other", None)
        if len(inner) != 1 or not isinstance(other, Tensor) or other.numel() != 1:
            break
        with suppress(ValueError, ZeroDivisionError):
            value = float(other)
            factor *= value if node.name() == "MulBackward0" else 1.0 / value
        node = inner[0]
    return factor, node


class _Probe:
    def __init__(self) -> None:
        self.num_seen = 0

    def on_backward(self, losses: Any) -> None:
        self.num_seen += 1

    def on_scaled(self, scaler: GradScaler, loss: Tensor, scaled: Tensor) -> None: ...

    def owns(self, optimizer: Any) -> bool:
        return False

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, proceed: Callable[[], Any]) -> Any: ...

    def keeps_scale(self, scaler: GradScaler) -> bool:
        return False


def _probe() -> bool:
    probe, leaf = _Probe(), torch.ones((), requires_grad=True)
    remove = listen(probe)
    try:
        (leaf * 3.0 / 4).backward()  # type: ignore[no-untyped-call]
    finally:
        remove()
    return probe.num_seen == 1 and abs(scalar_factor(leaf.exp() / 4)[0] - 0.25) < 1e-6


LISTENING = Feature(
    "listen_to_loops",
    relies_on="Tensor.backward calling torch.autograd.backward, and the saved operands of a division",
    lost="safetrain.watch and the integrations built on it",
    instead="an error when a loop is to be watched",
    probe=_probe,
)
