"""A step without a `loss_fn`: what the loop called its model with is recorded, and replayed as far as that goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._private.host import scalar_factor
from ..tensors.nest import leaves


class Recorder:
    """Notes each call of the model in a step, with gradients on. A recorded call takes the place of a batch in a replay.

    If the model returns its loss, a replay is complete, and so are repairs. If the loop computes the loss from what the model
    returns, the backward pass of a replay starts from the gradients that reached the model's outputs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[dict[str, Any]] = []
        self._outputs: list[list[Tensor]] = []
        self._gradients: list[list[Tensor | None]] = []
        """That reached the outputs of each call."""
        self._losses: list[Tensor] = []
        self._scale = 1.0
        self._operations: list[str] = []
        """Between the model's outputs and the loss."""
        self.loss_path: int | None = None
        """Which of the tensors that the model returns is the loss; None if the loop computes it."""
        self.is_known = False
        self._is_on = False
        before = model.register_forward_pre_hook(self._called, with_kwargs=True)
        after = model.register_forward_hook(self._returned, with_kwargs=True)
        self._handles = before, after

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        self._is_on = True
        self.calls, self._outputs, self._gradients = [], [], []

    def end(self) -> None:
        self._is_on = False
        self.calls, self._outputs, self._gradients, self._losses = [], [], [], []

    def pause(self) -> None:
        self._is_on = False

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_on and torch.is_grad_enabled():
            kept = {name: _detached(value) for name, value in kwargs.items()}
            self.calls.append({"args": tuple(map(_detached, args)), "kwargs": kept, "index": len(self.calls)})
            self._outputs.append([])
            self._gradients.append([])

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (self._is_on and torch.is_grad_enabled() and self._outputs and not self._outputs[-1]):
            return
        self._outputs[-1] = outputs = tensors_returned(output)
        if self.loss_path is not None:
            return
        gradients: list[Tensor | None] = [None] * len(outputs)
        self._gradients[-1] = gradients
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(_keeper(gradients, index))  # type: ignore[no-untyped-call]

    def note_loss(self, loss: Tensor) -> None:
        """Before its backward: is it one of the tensors that the model returned?"""
        if not self._outputs:
            return
        if self.is_known:
            if self.loss_path is None:
                self._operations = operations_between(loss, self._outputs[-1])
            return
        self.is_known = True
        _, node = scalar_factor(loss)
        outputs = self._outputs[-1]
        for index, tensor in enumerate(outputs):
            if tensor.numel() == 1 and tensor.grad_fn is not None and tensor.grad_fn in (node, loss.grad_fn):
                self.loss_path = index
        if self.loss_path is None:
            self._operations = operations_between(loss, outputs)

    def window(self, losses: list[Tensor], loss_scale: float) -> list[dict[str, Any]]:
        """The recorded calls of this step."""
        known = len(losses) == len(self.calls)
        self._losses = losses if known else [torch.stack(losses).sum() / len(self.calls)] * len(self.calls)
        self._scale = loss_scale
        return list(self.calls)

    def replay(self, model: nn.Module, call: Mapping[str, Any]) -> Any:
        """In place of a loss function."""
        tensors = tensors_returned(model(*call["args"], **call["kwargs"]))
        if self.loss_path is not None:
            return tensors[self.loss_path]
        index = call["index"]
        gradients = self._gradients[index] if index < len(self._gradients) else []
        pulled = [
            (tensor * (gradient / self._scale)).sum().float()
            for tensor, gradient in zip(tensors, gradients, strict=False)
            # One that is not finite was made by the loss, which is not replayed.
            if gradient is not None and tensor.requires_grad and bool(gradient.isfinite().all())
        ]
        if not pulled:
            return sum(t.float().sum() for t in tensors if t.is_floating_point() and t.requires_grad)
        total, loss = torch.stack(pulled).sum(), self._losses[index].to(torch.float32)
        return (
            total - total.detach() + loss if bool(loss.isfinite()) else total
        )  # the loop's loss, with these gradients

    def blind_spot(self) -> str:
        """For people: what a replay cannot show."""
        if self.loss_path is not None:
            return ""
        how = f" ({' ← '.join(self._operations)})" if self._operations else ""
        return (
            f"the model itself is finite when its call is replayed, so the value arose where the loop computes the loss from its outputs{how}, "
            "which a replay cannot run; pass loss_fn=… to watch() to find the line, and for repairs"
        )


def _keeper(gradients: list[Tensor | None], index: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        gradients[index] = gradient.detach()

    return keep


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf else value


def tensors_returned(output: Any) -> list[Tensor]:
    """The tensors of what a model returns, in a fixed order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):  # also the outputs of transformers
        return [tensor for value in output.values() for tensor in tensors_returned(value)]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in tensors_returned(value)]
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]


def operations_between(loss: Tensor, outputs: list[Tensor], limit: int = 12) -> list[str]:
    """Names of the operations that make the loss out of the outputs, the last one first."""
    ends = {tensor.grad_fn for tensor in outputs}
    found: list[str] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting and len(found) < limit:
        node = waiting.pop(0)
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        name = node.name().removesuffix("0").removesuffix("Backward")
        if "::" not in name:  # torch::autograd::AccumulateGrad: a parameter
            found.append(name)
        waiting += [each for each, _ in node.next_functions]
    return found
