"""The methods that a subclass may define, and an error for one that would never be called."""

from __future__ import annotations

import difflib
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
}
"""What other trainers call the same thing."""


def check_hooks(
    cls: type, base: type, hooks: Mapping[str, str] = HOOKS, elsewhere: Mapping[str, str] = ELSEWHERE
) -> None:
    """Raise TypeError for a method of `cls` that looks like a hook and is none, or is one with the wrong parameters.

    `hooks` has their signatures by name. Methods of its mixins count as its own.
    """
    own = {
        name: value
        for part in reversed(cls.__mro__)
        if not issubclass(base, part)
        for name, value in vars(part).items()
    }
    for name, value in own.items():
        function = getattr(value, "__func__", value)  # of a staticmethod or classmethod
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if name in hooks:
            _check_parameters(cls, name, function, hooks[name], has_self=not isinstance(value, staticmethod))
        elif not hasattr(base, name) and (meant := _meant(name, hooks, elsewhere)):
            known = "\n  ".join(hooks.values())
            raise TypeError(
                f"{cls.__name__}.{name} would never be called{f': did you mean {meant}?' if meant in hooks else '.'}\n"
                f"The methods of a {base.__name__} are:\n  {known}\nTo fix: rename it; start the name of a helper of your own with an underscore."
            )


def _meant(name: str, hooks: Mapping[str, str], elsewhere: Mapping[str, str]) -> str | None:
    if name in elsewhere:
        return elsewhere[name]
    close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.8)
    if close:
        return close[0]
    return "none of the hooks" if name.startswith("on_") else None


def _check_parameters(cls: type, name: str, function: object, signature: str, has_self: bool) -> None:
    expected = signature.split("(", 1)[1].split(")", 1)[0].split(", ")[0 if has_self else 1 :]
    try:
        inspect.signature(function).bind(*expected)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"{cls.__name__}.{name} cannot be called as {signature}: {error}.\nTo fix: give it these parameters."
        ) from None
