"""Checks of the parts that were handed over: what could only fail later, or silently."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import UsageError


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


def check_keywords(unnamed: tuple[Any, ...]) -> None:
    if unnamed:
        kinds = ", ".join(type(each).__name__ for each in unnamed)
        raise UsageError(
            f"SafeTrainer takes only the model without a name, and was given {kinds} too.\n"
            "To fix: SafeTrainer(model, loss_fn=…, optimizer=…, train_data=…)."
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer, evaluates: bool) -> None:
    if isinstance(scheduler, type):
        raise UsageError(
            f"scheduler is the class {scheduler.__name__}, not an instance of it.\nTo fix: pass {scheduler.__name__}(optimizer, …)."
        )
    moved = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if isinstance(moved, list) and not any(group is own for group in moved for own in optimizer.param_groups):
        raise UsageError(
            f"{type(scheduler).__name__} was made for another optimizer than the one that is stepped, whose rate it would never change.\n"
            "To fix: make it from the optimizer that you pass (or define build_scheduler(self, optimizer))."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and not evaluates:
        raise UsageError(
            "ReduceLROnPlateau follows loop.monitor of the evaluations, and there is no evaluation data: it would never be stepped.\n"
            "To fix: pass eval_data (data.eval in a config), or use a schedule over steps."
        )
