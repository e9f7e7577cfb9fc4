"""The methods that a subclass may define, and an error for one that would never be called."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping

HOOKS = {
    "training_step": "training_step(self, model, batch) -> loss or {'loss': …, metrics}",
    "evaluation_step": "evaluation_step(self, model, batch) -> loss or {'loss': …, metrics}",
    "build_model": "build_model(self) -> nn.Module",
    "build_data": "build_data(self) -> train_data or (train_data, eval_data)",
    "build_optimizer": "build_optimizer(self, model) -> Optimizer",
    "build_scheduler": "build_scheduler(self, optimizer) -> scheduler or None",
    "on_commit": "on_commit(self, view)",
    "on_incident": "on_incident(self, incident)",
    "on_evaluation": "on_evaluation(self, metrics)",
    "on_epoch_end": "on_epoch_end(self, epoch)",
}
ELSEWHERE = {
    "validation_step": "evaluation_step",
    "val_step": "evaluation_step",
    "eval_step": "evaluation_step",
    "train_step": "training_step",
    "test_step": "evaluation_step",
    "compute_loss": "training_step",
    "configure_optimizers": "build_optimizer",
    "train_dataloader": "build_data",
    "val_dataloader": "build_data",
    "build_dataloader": "build_data",
    "build_dataloaders": "build_data",
    "build_dataset": "build_data",
    "build_datasets": "build_data",
    "build_loss": "training_step",
    "build_loss_fn": "training_step",
    "build_criterion": "training_step",
    "build_lr_scheduler": "build_scheduler",
    "on_validation_end": "on_evaluation",
    "on_evaluate": "on_evaluation",
    "on_validation_epoch_end": "on_evaluation",
    "on_train_epoch_end": "on_epoch_end",
}
"""What other frameworks call them."""
PARTS = (
    "config",
    "machine",
    "model",
    "guards",
    "precision",
    "loss_fn",
    "optimizer",
    "scheduler",
    "stream",
    "ema",
    "ladder",
    "stepper",
    "evaluation",
)
"""Attributes that the constructor of a trainer sets."""
REPLACEABLE = {"loss_fn", "scheduler", "guards", "ladder"}
"""Those that may be replaced before `fit`."""


def check_hooks(cls: type, base: type) -> None:
    """Raise TypeError for a method of `cls` that looks like a hook and is none, or is one with the wrong parameters."""
    own = _methods(cls, base)
    for name in own:
        if name not in HOOKS and not hasattr(base, name) and (meant := _meant(name)) and not _is_called(name, own):
            raise _never_called(cls, base, name, meant, HOOKS)
    _check_parameters(cls, own, HOOKS)
    _check_not_ours(cls, base)


def _check_not_ours(cls: type, base: type) -> None:
    """A name of the trainer's that is given another meaning, by accident: what the trainer calls would be the user's."""
    for name, value in vars(cls).items():
        ours = getattr(base, name, None)
        if name in PARTS and not isinstance(value, property):
            instead = f"build_{name}" if f"build_{name}" in HOOKS else f"{name}=… of the constructor, or another name"
            raise TypeError(
                f"{cls.__name__}.{name} would never be used: the constructor sets {name} of each {base.__name__}.\nTo fix: {instead}."
            )
        if name in HOOKS or name.startswith("__") or ours is None:
            continue
        if isinstance(ours, property):
            is_other = not isinstance(value, (property, functools.cached_property))
        elif inspect.isfunction(ours):
            expected = f"{name}({', '.join(inspect.signature(ours).parameters)})"
            is_other = not callable(getattr(value, "__func__", value)) or _misfit(value, expected) is not None
        else:
            continue
        if is_other:
            raise TypeError(
                f"{cls.__name__}.{name} replaces {base.__name__}.{name}, which the trainer needs.\nTo fix: give yours another name."
            )


@functools.cache
def methods_of(base: type) -> Mapping[str, str]:
    """The protocol that a base class spells out: every public method, as `name(self, parameters)`."""
    methods = {name: value for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"}
    return {name: f"{name}({', '.join(inspect.signature(value).parameters)})" for name, value in methods.items()}


def check_protocol(cls: type, base: type, protocol: Mapping[str, str]) -> None:
    """The same for a class that may have methods beyond its protocol: a method is taken for a misspelt one only if the class
    lacks the one it resembles, and if it can be called like it."""
    own = _methods(cls, base)
    for name, value in own.items():
        close = [] if hasattr(base, name) else difflib.get_close_matches(name, protocol, n=1, cutoff=0.8)
        if close and close[0] not in own and _misfit(value, protocol[close[0]]) is None:
            raise _never_called(cls, base, name, close[0], protocol)
    _check_parameters(cls, own, protocol)


def _methods(cls: type, base: type) -> dict[str, object]:
    """Public ones that are not from `base`; those of its mixins count as its own."""
    own = {
        name: value
        for part in reversed(cls.__mro__)
        if not issubclass(base, part)
        for name, value in vars(part).items()
    }
    # A staticmethod or classmethod has its function inside.
    functions = {name: value for name, value in own.items() if inspect.isfunction(getattr(value, "__func__", value))}
    return {name: value for name, value in functions.items() if not name.startswith("_")}


def _is_called(name: str, own: Mapping[str, object]) -> bool:
    """Whether another method mentions it, so that it is a helper and no hook that was meant to be called by the trainer."""
    functions = [getattr(value, "__func__", value) for key, value in own.items() if key != name]
    return any(name in getattr(getattr(function, "__code__", None), "co_names", ()) for function in functions)


def _meant(name: str) -> str | None:
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)
    if close:
        return close[0]
    return "none of the hooks" if name.startswith("on_") else None


def _never_called(cls: type, base: type, name: str, meant: str, hooks: Mapping[str, str]) -> TypeError:
    known = f"It is {hooks[meant]}." if meant in hooks else f"The methods of a {base.__name__} are {', '.join(hooks)}."
    return TypeError(
        f"{cls.__name__}.{name} would never be called{f': did you mean {meant}?' if meant in hooks else '.'}\n{known}\n"
        "To fix: rename it; start the name of a helper of your own with an underscore, or call it from one of these."
    )


def _check_parameters(cls: type, own: Mapping[str, object], hooks: Mapping[str, str]) -> None:
    for name, value in own.items():
        if name in hooks and (misfit := _misfit(value, hooks[name])):
            raise TypeError(
                f"{cls.__name__}.{name} cannot be called as {hooks[name]}: {misfit}.\nTo fix: give it these parameters."
            )


def _misfit(value: object, signature: str) -> str | None:
    """Why a method cannot be called as the signature says."""
    expected = signature.split("(", 1)[1].split(")", 1)[0].split(", ")[1 if isinstance(value, staticmethod) else 0 :]
    try:
        inspect.signature(getattr(value, "__func__", value)).bind(*expected)  # type: ignore[arg-type]
    except TypeError as error:
        return str(error)
    return None
