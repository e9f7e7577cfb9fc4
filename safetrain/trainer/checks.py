"""Checks of the objects passed to the trainer: mistakes that would only fail later, or silently."""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import __version__
from ..checkpoint.compatibility import values_by_key
from ..config.private import private_keys
from ..config.schema import Config
from ..distributed.comm import gather, name_ranks, num_processes
from ..errors import UsageError

OF_EACH_RANK = ("name", "data.train*", "data.eval*", "data.num_workers", "loop.device", "logging*")
"""Keys of the config that may differ over the ranks."""


def check_config_of_ranks(config: Config) -> None:
    """Raise on all ranks if one has another config, or other versions."""
    if num_processes() == 1:
        return
    private = private_keys(config)
    values = {f"config: {key}": value for key, value in values_by_key(config).items() if key not in private}
    values = {key: v for key, v in values.items() if not any(fnmatch(key, f"config: {free}") for free in OF_EACH_RANK)}
    _check_alike({**values, "torch": str(torch.__version__), "safetrain": __version__})


def check_optimizer_of_ranks(optimizer: Optimizer) -> None:
    """The same for the settings of an optimizer that was handed over."""
    if num_processes() == 1:
        return
    plain = (bool, int, float, str, tuple)
    _check_alike(
        {"optimizer": type(optimizer).__name__}
        | {
            f"optimizer: {key} of group {index}": value
            for index, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, plain)
        }
    )


def check_model_of_ranks(model: nn.Module) -> None:
    """The same for the names and shapes of the parameters."""
    if num_processes() > 1:
        _check_alike({f"model: shape of {name}": tuple(p.shape) for name, p in model.named_parameters()})


def _check_alike(own: Mapping[str, Any]) -> None:
    text = repr(sorted(own.items()))
    if len(set(gather(hashlib.sha256(text.encode()).digest()))) == 1:
        return
    found = gather(own)
    lines = []
    for key in dict.fromkeys(key for each in found for key in each):
        values = [repr(each.get(key)) for each in found]
        usual, _ = Counter(values).most_common(1)[0]  # of a tie, that of rank 0
        if others := [rank for rank, value in enumerate(values) if value != usual]:
            lines.append(
                f"{key} is {values[others[0]]} on {name_ranks(others)}, and {usual} on {name_ranks([values.index(usual)])}"
            )
    if lines:
        more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise UsageError(
            "the ranks were not started in the same way:\n  " + "\n  ".join(lines[:8]) + more + "\n"
            "To fix: give every rank the same config, overrides and code. Data and logging may differ."
        )


def check_trainable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model must be a torch.nn.Module, got {type(model).__name__}.\nTo fix: pass an instance of your module."
        )
    _check_not_flattened(model)
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


def _check_not_flattened(model: nn.Module) -> None:
    """FSDP1 makes one flat tensor of the parameters of several layers: what a rank has of a layer is of no shape that the others know."""
    known = sys.modules.get("torch.distributed.fsdp")  # importing it is slow; before that, no model is wrapped
    if known is None or num_processes() == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, known.FullyShardedDataParallel):
            raise UsageError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), which is not supported with several processes.\n"
                "To fix: shard it with FSDP2, that is torch.distributed.fsdp.fully_shard (fsdp_version: 2 in a config of accelerate), or give "
                "SafeTrainer the model as it is and set loop.strategy=fsdp."
            )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, type):
        raise UsageError(
            f"optimizer is the class {optimizer.__name__}, not an instance of it.\n"
            f"To fix: pass {optimizer.__name__}(model.parameters(), lr=…)."
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.\n"
            "To fix: pass the optimizer itself; several are one by safetrain.optimizers.OptimizerGroup(name=…, other=…)."
        )
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


KEYWORDS = {
    **dict.fromkeys(
        ("val_data", "valid_data", "validation_data", "test_data", "val_loader", "val_dataloader"), "eval_data"
    ),
    **dict.fromkeys(("eval_loader", "eval_dataloader", "eval_dataset", "val_dataset"), "eval_data"),
    **dict.fromkeys(("data", "train_loader", "train_dataloader", "train_dataset", "dataset", "loader"), "train_data"),
    **dict.fromkeys(("loss", "criterion", "loss_function"), "loss_fn"),
    **dict.fromkeys(("lr_scheduler", "schedule"), "scheduler"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(("out", "out_dir", "output_dir", "log_dir", "save_dir"), "run_dir"),
}
"""What else the arguments of the constructor are called."""
SETTINGS = {
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "num_train_epochs"), "loop.max_epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_iters"), "loop.max_steps"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "loop.grad_accum"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val", "clip_grad_norm"), "guards.clip.max_norm"),
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.lr"),
}
"""What else options of the config are called."""
_KEYS = frozenset(values_by_key(Config()))


def check_keywords(unnamed: tuple[Any, ...], unknown: Iterable[str], known: Iterable[str]) -> None:
    """`known`: the arguments that there are."""
    if unknown := list(unknown):
        raise UsageError(
            f"SafeTrainer has no argument {' or '.join(unknown)}.\n"
            f"To fix: {'; '.join(_instead(name, list(known)) for name in unknown)}."
        )
    if unnamed:
        kinds = ", ".join(type(each).__name__ for each in unnamed)
        raise UsageError(
            f"SafeTrainer takes only the model without a name, and was given {kinds} too.\n"
            "To fix: SafeTrainer(model, loss_fn=…, optimizer=…, train_data=…)."
        )


def _instead(name: str, known: list[str]) -> str:
    """What to write for an argument that there is not."""
    if name in KEYWORDS:
        return f"{KEYWORDS[name]}=… instead of {name}=…"
    sections = ("", *(f"{part}." for part in ("loop", "data", "checkpoint", "logging", "recovery", "forensics")))
    key = SETTINGS.get(name) or next((section + name for section in sections if section + name in _KEYS), None)
    if key is not None:
        node = "…"
        for part in reversed(key.split(".")):
            node = f'{{"{part}": {node}}}'
        return f"{name} is {key} of the config: config={node}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return (
        f"{close[0]}=… instead of {name}=…" if close else f"its arguments are {', '.join(known)}; all else is in config"
    )


def check_constructed(trainer: object) -> None:
    """A subclass with a constructor of its own may have forgotten that of the trainer."""
    if "_made" not in vars(trainer):
        name = type(trainer).__name__
        raise UsageError(
            f"{name}.__init__ did not call the constructor of SafeTrainer, or set attributes before it failed.\n"
            f"To fix: call super().__init__(model, loss_fn=…, optimizer=…, train_data=…) in {name}.__init__."
        )


def check_scheduler(scheduler: Any, optimizer: Optimizer, evaluates: bool) -> None:
    if isinstance(scheduler, type):
        raise UsageError(
            f"scheduler is the class {scheduler.__name__}, not an instance of it.\nTo fix: pass {scheduler.__name__}(optimizer, …)."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"scheduler is a {type(scheduler).__name__}, which has no step().\n"
            "To fix: pass one scheduler; several are one by torch.optim.lr_scheduler.SequentialLR or ChainedScheduler."
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


def check_parts(trainer: object, made: Mapping[str, int]) -> None:
    """What the constructor has set, other parts of the trainer hold as well: with another one nothing would change, or something would
    fail later. `made`: the id of each part."""
    for name, identity in made.items():
        if id(now := getattr(trainer, name)) != identity:
            raise UsageError(
                f"the attribute {name} of the trainer was replaced by a {type(now).__name__} after it was made.\n"
                f"To fix: give an attribute of your own another name; another {name} needs a new trainer."
            )
