"""The loss that a training step returns: adapted to `loss(model, batch)`, taken apart, and checked."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import LossError, UsageError

LossFn = Callable[[nn.Module, Any], Any]
_NO_LOSS = torch.zeros(())
OUTPUTS = {
    "input",
    "inputs",
    "output",
    "outputs",
    "pred",
    "preds",
    "prediction",
    "predictions",
    "logits",
    "scores",
    "y_pred",
    "y_hat",
}
TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "truth"}


def adapt_loss(loss: Any) -> LossFn:
    """Let a `loss(input, target)` such as `nn.CrossEntropyLoss()` be used on batches of (inputs, targets).

    It is known by the names of its first two parameters, see `OUTPUTS` and `TARGETS`.
    """
    if inspect.isclass(loss):
        raise UsageError(
            f"loss_fn is the class {loss.__name__}, not an instance of it.\nTo fix: pass {loss.__name__}(), with the arguments it takes."
        )
    if not callable(loss):
        raise UsageError(f"loss_fn must be callable, got {loss!r}.\nTo fix: pass a function loss_fn(model, batch).")
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # a builtin
        return loss  # type: ignore[no-any-return]
    if len(names) < 2 or names[0].lower() not in OUTPUTS or names[1].lower() not in TARGETS:
        return loss  # type: ignore[no-any-return]

    def supervised_loss(model: nn.Module, batch: Any) -> Any:
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise LossError(
                f"{type(loss).__name__}(input, target) needs batches of (inputs, targets), this one is a {type(batch).__name__}.\n"
                "To fix: write a loss_fn(model, batch) that takes the batch apart."
            )
        inputs, targets = batch
        return loss(model(inputs), targets)

    return supervised_loss


def note_of_arguments(loss: Any, model: nn.Module, error: Exception) -> None:
    """Say what a loss is called with, if it raised because it was given the model where it expected outputs."""
    if type(model).__name__ not in str(error) or not hasattr(error, "add_note"):  # Python 3.11
        return
    called = loss.forward if isinstance(loss, nn.Module) else loss
    with contextlib.suppress(TypeError, ValueError):
        names = list(inspect.signature(called).parameters)
        if names and "model" not in names[0]:
            error.add_note(
                f"safetrain: loss_fn is called as loss_fn(model, batch), and this one takes ({', '.join(names)}).\n"
                "To fix: name the first two parameters input and target, if it compares outputs with targets; or compute the outputs in it: "
                "def loss_fn(model, batch)."
            )


def split_loss(output: Any, where: str) -> tuple[Tensor, dict[str, Any]]:
    """The loss and the scalar metrics out of what a step returned; all other values are ignored."""
    metrics: dict[str, Any] = {}
    if not isinstance(output, Tensor) and isinstance(output, Mapping):
        if "loss" not in output:
            raise LossError(
                f"{where} returned a dict without 'loss' (it has {', '.join(map(repr, output))}).\nTo fix: return {{'loss': …}}."
            )
        metrics = {key: value for key, value in output.items() if key != "loss" and _is_scalar(value)}
        if names := [key for key in metrics if not isinstance(key, str)]:
            raise LossError(
                f"{where} returned a metric under {names[0]!r}.\nTo fix: give metrics names that are strings."
            )
        output = output["loss"]
    if not isinstance(output, Tensor):
        raise LossError(
            f"{where} returned {type(output).__name__}, not a tensor or a dict with 'loss'.\n"
            "To fix: return the loss tensor itself (not loss.item()), and check that there is a return statement."
        )
    if output.numel() != 1:
        raise LossError(
            f"{where} returned a loss of shape {tuple(output.shape)}; it must be a scalar.\nTo fix: return loss.mean() or loss.sum()."
        )
    if not output.is_floating_point():
        raise LossError(
            f"{where} returned a loss of type {output.dtype}; it must be a floating-point number.\nTo fix: return a float loss."
        )
    return output if output.dim() == 0 else output.reshape(()), metrics


def split_metrics(output: Any, where: str) -> dict[str, Any]:
    """The metrics out of what an evaluation step returned: its loss, if there is one, and the scalars next to it."""
    if isinstance(output, Real):
        output = torch.tensor(float(output))
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), Real):
        output = {**output, "loss": torch.tensor(float(output["loss"]))}
    if isinstance(output, Tensor) or not isinstance(output, Mapping) or "loss" in output:
        loss, metrics = split_loss(output, where)
        return {"loss": loss, **metrics}
    metrics = split_loss({**output, "loss": _NO_LOSS}, where)[1]
    if not metrics:
        raise LossError(
            f"{where} returned a dict without any number (it has {', '.join(map(repr, output)) or 'nothing'}).\n"
            "To fix: return the loss, or a dict of metrics that are single numbers."
        )
    return metrics


def unlogged_values(output: Any) -> list[str]:
    """Names of the values that a step returned that are not numbers, and cannot be logged as metrics."""
    if isinstance(output, Tensor) or not isinstance(output, Mapping):
        return []
    return [str(key) for key, value in output.items() if key != "loss" and value is not None and not _is_scalar(value)]


def no_graph(where: str) -> LossError:
    return LossError(
        f"{where} returned a loss that is not connected to any trainable parameter, so it has no gradient.\n"
        "To fix: compute it from the model's output without .detach(), .item(), torch.no_grad() or a new torch.tensor(…)."
    )


def check_no_backward(parameters: Iterable[Tensor]) -> None:
    """After the first forward pass of a run: gradients can only come from a backward in training_step."""
    if any(p.grad is not None for p in parameters):
        raise LossError(
            "training_step called backward() itself, and the trainer calls it too, so every gradient would count twice.\n"
            "To fix: return the loss without calling backward(); gradient penalties use torch.autograd.grad."
        )


def check_reached(optimizer: Optimizer) -> None:
    """After the first backward pass of a run."""
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        raise LossError(
            "the loss reaches none of the parameters that the optimizer moves, so training would change nothing.\n"
            "To fix: compute the loss from the output of the model that is trained, and give the optimizer the parameters that "
            "the loss depends on."
        )


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)  # also NumPy's
