"""Builds the parts of a run from its config, and checks the parts that were handed over."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.distributed import DistNetworkError
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..config.schema import LoopConfig, Target
from ..config.targets import import_target, instantiate
from ..errors import ConfigError, LossError, UsageError
from ..guards import REGISTRY, Guard
from .engine import Engine

LossFn = Callable[[nn.Module, Any], Any]


def open_engine(loop: LoopConfig) -> Engine:
    """The machine to train on. That the processes cannot reach each other is a matter of how they were started."""
    try:
        return Engine(loop)
    except DistNetworkError as error:
        address, port = os.environ.get("MASTER_ADDR", "?"), os.environ.get("MASTER_PORT", "?")
        if "EADDRINUSE" in str(error):
            problem = f"port {port}, at which the processes of this run are to meet, is in use by another program"
            fix = "start it with another port (torchrun --master-port N, or MASTER_PORT=N), or with torchrun --standalone, which finds a free one"
        else:
            problem = f"the processes of this run could not meet at {address}:{port}: {str(error).splitlines()[0]}"
            fix = "check MASTER_ADDR and MASTER_PORT, and that every process was started"
        raise UsageError(f"{problem}.\nTo fix: {fix}.") from error


def build_guards(options: Mapping[str, Any], extra: Iterable[Guard] = ()) -> list[Guard]:
    """The guards of a config, and others beside them; one of the same name takes the place of the configured one."""
    guards: dict[str, Guard] = {}
    for name, given in options.items():
        if given is None:
            continue
        if isinstance(given, Mapping):
            arguments = {key: value for key, value in given.items() if key != "_target_"}
            cls = import_target(given["_target_"])
            if not (inspect.isclass(cls) and issubclass(cls, Guard)):
                raise ConfigError(
                    f"guards.{name}: {given['_target_']} is not a Guard. To fix: derive it from safetrain.Guard."
                )
            guard = cls(**arguments)
        else:
            guard = REGISTRY[name](given)
        guard.name = name  # type: ignore[misc]  # its key: two of one class may be told apart
        guards[name] = guard
    added: set[str] = set()
    for guard in extra:
        if not isinstance(guard, Guard):
            raise UsageError(f"guards must be Guard instances, got {guard!r}.\nTo fix: derive it from safetrain.Guard.")
        if guard.name in added:
            raise UsageError(
                f"two guards of the name {guard.name!r} were passed.\n"
                "To fix: give one of them another name (guard.name = 'other'), or leave it out."
            )
        added.add(guard.name)
        guards[guard.name] = guard
    return list(guards.values())


def build_loss(node: Target) -> LossFn:
    """`loss(model, batch)` from a `_target_`: a class is instantiated, a function gets its arguments bound."""
    target = import_target(node["_target_"])
    if inspect.isclass(target):
        loss = instantiate(node)
    else:
        loss = partial(target, **{key: value for key, value in node.items() if key != "_target_"})
    return adapt_loss(loss)


def adapt_loss(loss: Any) -> LossFn:
    """Let a `loss(input, target)` such as `nn.CrossEntropyLoss()` be used on batches of (inputs, targets)."""
    if not callable(loss):
        raise UsageError(f"loss_fn must be callable, got {loss!r}.\nTo fix: pass a function loss_fn(model, batch).")
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # a builtin
        return loss  # type: ignore[no-any-return]
    if names[:2] != ["input", "target"]:
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


def check_trainable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model must be a torch.nn.Module, got {type(model).__name__}.\nTo fix: pass an instance of your module."
        )
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"the model is not complete yet: the shape of {', '.join(lazy[:5])} comes from the first batch that it is called with.\n"
            "To fix: call the model on one batch before you make the optimizer and the trainer."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "the model has no trainable parameters.\n"
            "To fix: check that its layers are attributes (or in a ModuleList, not a plain list) and that some parameters "
            "have requires_grad=True."
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times within one step, so a step cannot be judged before it moves the weights.\n"
            "To fix: use a first-order optimizer such as torch.optim.AdamW."
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "none of the optimizer's parameters belongs to the model, so training would change nothing.\n"
            "To fix: build the optimizer from the parameters of this very model, after any copy or replacement of it."
        )


def check_scheduler(scheduler: Any, evaluates: bool) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) and not evaluates:
        raise UsageError(
            "ReduceLROnPlateau follows loop.monitor of the evaluations, and there is no evaluation data: it would never be stepped.\n"
            "To fix: pass eval_data (data.eval in a config), or use a schedule over steps."
        )


def all_parameters(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """The model's parameters in its own order, then those that only the optimizer has (of a loss with weights, say)."""
    unique = {id(p): p for p in model.parameters()}
    for group in optimizer.param_groups:
        unique.update({id(p): p for p in group["params"] if id(p) not in unique})
    return list(unique.values())


def split_loss(output: Any, where: str) -> tuple[Tensor, dict[str, Any]]:
    """The loss and the scalar metrics beside it, out of what a step returned; other values are left aside."""
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


def left_aside(output: Any) -> list[str]:
    """Names of what a step returned beside the loss that is no number, and cannot be logged as a metric."""
    if isinstance(output, Tensor) or not isinstance(output, Mapping):
        return []
    return [str(key) for key, value in output.items() if key != "loss" and value is not None and not _is_scalar(value)]


def check_graph(loss: Tensor, where: str) -> None:
    if not loss.requires_grad:
        raise LossError(
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
