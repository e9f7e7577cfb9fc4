"""The config of `watch`, and the sections that the user's own loop decides itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ..config.load import load
from ..config.schema import Config
from ..core.loss import split_loss
from ..core.verdict import Action, Decision
from ..data.sources import Source
from ..errors import ConfigError, UsageError
from ..optim.optimizers import OptimizerGroup
from ..precision.autocast import AUTOCAST_DTYPES
from ..step.step import Step
from ..tensors.nest import same_nest
from ..tensors.rng import undisturbed_rng
from ..trainer import checks
from .interception import SEVERAL_CLOSURES

LOOPS_OWN = ("trainer", "model", "data", "loss", "optimizer", "scheduler", "loop")
"""Sections of a config that say what the loop does itself."""
USED = {"loop.log_every", "loop.rank_timeout_seconds", "loop.precision"}
QUIETER = {"checkpoint.enabled": False, "checkpoint.save_final": False, "logging.console": "incidents"}
"""What is different from SafeTrainer unless the config says otherwise: the loop saves and logs by itself."""
PRECISIONS = ("fp32", "bf16", "fp16")


def hosted_config(given: Any, precision: str) -> Config:
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision is {precision!r}.\nTo fix: say what the loop's autocast does: one of {', '.join(PRECISIONS)}."
        )
    loaded = load(given)
    if not isinstance(given, Config):
        set_by_user = [key for key, origin in loaded.origins.items() if origin != "default"]
        foreign = [key for key in set_by_user if key.partition(".")[0] in LOOPS_OWN and key not in USED]
        if foreign:
            raise ConfigError(
                f"{', '.join(sorted(foreign)[:6])}: the loop decides this itself, so it would have no effect under watch().\n"
                "To fix: leave it out; guards, recovery, forensics, checkpoint, logging, name and seed are used here."
            )
        if "loop.precision" in set_by_user and loaded.config.loop.precision != precision:
            raise ConfigError(
                f"loop.precision is {loaded.config.loop.precision} in the config and precision={precision!r} was given.\n"
                "To fix: give watch(precision=…) only."
            )
        config = loaded.config
        for key, value in QUIETER.items():
            section, name = key.split(".")
            if key not in set_by_user:
                setattr(getattr(config, section), name, value)
    else:
        config = loaded.config
    config.loop.precision, config.loop.compile, config.loop.host_read_every = precision, False, 1
    return config


def bare(part: Any, attribute: str) -> Any:
    """Without accelerate's wrapper around an optimizer or a scheduler."""
    return getattr(part, attribute) if type(part).__module__.startswith("accelerate.") else part


def as_one(given: Any, model: nn.Module) -> tuple[list[Optimizer], Optimizer]:
    """The loop's optimizers, and one that stands for all of them."""
    many = (
        list(given.values())
        if isinstance(given, dict)
        else list(given)
        if isinstance(given, (list, tuple))
        else [given]
    )
    optimizers = [bare(each, "optimizer") for each in many]
    for each in optimizers:
        if isinstance(each, LBFGS):
            raise UsageError(f"LBFGS {SEVERAL_CLOSURES}")
        checks.check_optimizer(model, each)
    if len(optimizers) == 1:
        return optimizers, optimizers[0]
    return optimizers, OptimizerGroup(**{f"optimizer_{index}": each for index, each in enumerate(optimizers)})


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model must be a torch.nn.Module, got {type(model).__name__}.\nTo fix: watch(model, optimizer): the model comes first."
        )


class LoopData(Source):
    """The loop reads its data itself: there is nothing to hand out, to skip or to leave out."""

    why_no_ids = ""

    def open(self, epoch: int, position: int) -> Iterator[Any]:
        return iter(())


class Schedulers:
    """Several schedulers of one loop, as one."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)

    def step(self) -> None:
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(index): member.state_dict() for index, member in enumerate(self.members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, member in enumerate(self.members):
            member.load_state_dict(state[str(index)])


def one_scheduler(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return Schedulers([bare(each, "scheduler") for each in given])
    return bare(given, "scheduler")


class Kept:
    """Where the schedule, the rates of the optimizer, and what `guard.keep` was given stand after a refusal."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._schedule = copy.deepcopy(step.schedule.state_dict())
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in step.optimizer.param_groups]
        self._groups = copy.deepcopy(self._groups)
        self._parts = {name: copy.deepcopy(part.state_dict()) for name, part in step.stateful.items()}

    def restore(self) -> None:
        step = self._step
        step.schedule.load_state_dict(self._schedule)
        for group, before in zip(step.optimizer.param_groups, self._groups, strict=False):
            group.update(before)
        for name, state in self._parts.items():
            if name in step.stateful:
                step.stateful[name].load_state_dict(state)


def check_first_step(step: Step, losses: Sequence[Tensor]) -> None:
    if all(p.grad is None for group in step.optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "optimizer.step() was called, and no parameter of the optimizer has a gradient.\n"
            "To fix: call loss.backward() before it, inside the block of guard.step(), and not zero_grad() in between."
        )
    if not losses:
        raise UsageError(
            "there are gradients, and no backward() was seen in this block, so the loss of this step is unknown.\n"
            "To fix: put loss.backward() into the block: with guard.step(batch): …; a loop that makes its gradients in another way "
            "(torch.func, a kernel of its own) calls guard.note_loss(loss) before optimizer.step()."
        )


def check_loss_fn(step: Step, batch: Any, loss: float) -> str | None:
    """In the first step: `loss_fn` is what replays and repairs compute. What is odd about it; raises if it cannot be called."""
    transaction = step.transaction
    with undisturbed_rng(), transaction.aside(), step.precision.autocast():
        transaction.random_state.restore()
        try:
            output = step.training_step(step.model, same_nest(batch))
            found, _ = split_loss(output, "loss_fn")  # safetrain: ignore[ST501] takes it apart, and computes nothing
        except Exception as error:
            raise UsageError(
                f"loss_fn(model, batch) raised {type(error).__name__}: {error}. A refused step is replayed with it.\n"
                "To fix: loss_fn takes the model and what guard.step(batch) was given, and returns the loss that the loop calls "
                "backward on."
            ) from error
        value = float(found.detach())
    tolerance = 1e-3 if step.precision.name == "fp32" else 3e-2
    if not math.isfinite(value) or not math.isfinite(loss) or abs(value - loss) <= tolerance * max(abs(loss), 1e-3):
        return None
    return (
        f"loss_fn(model, batch) is {value:.6g} in the first step, and the loop called backward on {loss:.6g}: if they differ by more than "
        "random numbers, a replay or a repair computes something else than the loop"
    )


class AutocastSeen:
    """Which arithmetic the loop calls its model in, in the first step."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._device_type = device_type
        self.name: str | None = None
        self._handle = model.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        if torch.is_grad_enabled() and torch.is_autocast_enabled(self._device_type):
            dtype = torch.get_autocast_dtype(self._device_type)
            self.name = next((name for name, each in AUTOCAST_DTYPES.items() if each is dtype), None)

    def remove(self) -> None:
        self._handle.remove()


def check_precision(given: str, seen: str | None, has_scaler: bool) -> None:
    if has_scaler and given != "fp16":
        raise UsageError(
            f"the loop scales its loss with a GradScaler, and watch() was told precision={given!r}.\n"
            "To fix: watch(…, precision='fp16'), so that a replay computes what the loop does."
        )
    if seen is not None and seen != given:
        raise UsageError(
            f"the loop calls its model under autocast to {seen}, and watch() was told precision={given!r}.\n"
            f"To fix: watch(…, precision='{seen}'), so that a replay computes what the loop does."
        )


def confirmable(step: Step, decision: Decision, say_once: Callable[[str], None]) -> Decision:
    """A suspicion alone refuses nothing. Where the loss is the loop's own, no trial can confirm it."""
    if decision.action is Action.COMMIT or decision.tried.action is not Action.COMMIT:
        return decision
    if not step.exchange.any_rank(bool(step.blind_spot())):
        return decision
    say_once(
        "a step looks suspicious, and is applied: the loop computes the loss itself, so the update cannot be tried on other batches; "
        "pass loss_fn=… to watch() for that"
    )
    return decision.tried
