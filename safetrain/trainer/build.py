"""Builds the parts of a run from its config, and checks the parts that were handed over."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import DistNetworkError
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..config.schema import LoopConfig, Target
from ..config.targets import import_target, instantiate
from ..core.loss import LossFn, adapt_loss
from ..errors import ConfigError, LossError, UsageError
from ..guards import REGISTRY, Guard
from .engine import Engine


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
