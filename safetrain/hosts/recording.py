"""Steps without a `loss_fn`: records the arguments of the model's calls, and replays as much as they allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
        self._is_known = self._is_partial = self._is_on = False
        before = model.register_forward_pre_hook(self._called, with_kwargs=True)
        after = model.register_forward_hook(self._returned, with_kwargs=True)
        self._handles = before, after

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def is_whole(self) -> bool:
        """A replay computes the loss of this step as the loop did."""
        return self.loss_path is not None and not self._is_partial

    def begin(self) -> None:
        self._is_on, self._is_partial = True, False
        self.calls, self._outputs, self._gradients = [], [], []

    def forget(self, count: int) -> None:
        """The first calls: the loop has thrown their gradients away."""
        del self.calls[:count], self._outputs[:count], self._gradients[:count]
        for index, call in enumerate(self.calls):
            call["index"] = index

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
        self._outputs[-1] = tensors_returned(output)
        if self.loss_path is None:
            self._keep_gradients()

    def _keep_gradients(self) -> None:
        outputs = self._outputs[-1]
        gradients: list[Tensor | None] = [None] * len(outputs)
        self._gradients[-1] = gradients
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(_keeper(gradients, index))  # type: ignore[no-untyped-call]

    def note_loss(self, loss: Tensor, factor: float, node: Any) -> None:
        """Before its backward: is it one of the tensors that the model returned? `factor` and `node` are those of `scalar_factor`."""
        if not self._outputs:
            return
        outputs, ends, path = self._outputs[-1], (node, loss.grad_fn), self.loss_path
        if not self._is_known:
            self._is_known = True
            for index, tensor in enumerate(outputs):
                if tensor.numel() == 1 and tensor.grad_fn is not None and tensor.grad_fn in ends:
                    self.loss_path = index
        elif path is not None and (
            path >= len(outputs) or outputs[path].grad_fn not in ends or not math.isfinite(factor)
        ):
            self._is_partial = True  # in this step the loop made another loss of it
            self._keep_gradients()
        if not self.is_whole:
            self.calls[-1]["is_whole"] = False
            self._operations = operations_between(loss, outputs)

    def window(
        self, losses: list[Tensor], factors: list[float], loss_scale: float, is_divided: bool
    ) -> list[dict[str, Any]]:
        """The recorded calls of this step. `is_divided`: by the number of micro-batches, which a replay does too."""
        count = len(self.calls)
        if len(losses) != count:  # several calls for one loss
            losses, factors = [torch.stack(losses).sum()] * count, [1.0] * count
        self._losses = [loss * count for loss in losses] if is_divided else losses
        for call, factor in zip(self.calls, factors, strict=True):
            call["factor"] = 1.0 if is_divided else factor
        self._scale = loss_scale / count if is_divided else loss_scale
        return list(self.calls)

    def replay(self, model: nn.Module, call: Mapping[str, Any]) -> Any:
        """In place of a loss function."""
        tensors = tensors_returned(model(*call["args"], **call["kwargs"]))
        index, factor = call["index"], call.get("factor", 1.0)
        if self.loss_path is not None and call.get("is_whole", True):
            loss = tensors[self.loss_path]
            return loss if factor == 1.0 else loss * factor
        gradients = self._gradients[index] if index < len(self._gradients) else []
        pulled = [
            (tensor * (gradient / self._scale)).sum().float()
            for tensor, gradient in zip(tensors, gradients, strict=False)
            # One that is not finite was made by the loss, which is not replayed.
            if gradient is not None and tensor.requires_grad and bool(gradient.isfinite().all())
        ]
        if not pulled:
            return sum(t.float().sum() for t in tensors if t.is_floating_point() and t.requires_grad)
        total, value = torch.stack(pulled).sum(), self._losses[index].to(torch.float32)
        return (
            total - total.detach() + value if bool(value.isfinite()) else total
        )  # the loop's loss, with these gradients

    def blind_spot(self) -> str:
        """For people: what a replay cannot show."""
        if self.is_whole:
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
