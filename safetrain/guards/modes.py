"""Modules that behave differently in train and eval mode (dropout, BatchNorm): whether each is in the right mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..core.verdict import Finding
from .graph import listed

DROPS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT = (
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)


def sensitive(model: nn.Module) -> dict[str, nn.Module]:
    """Dropout that drops something, and normalisation that collects statistics."""
    return {name: module for name, module in model.named_modules() if _is_sensitive(module)}


def _is_sensitive(module: nn.Module) -> bool:
    if isinstance(module, DROPS):
        return module.p > 0
    if getattr(module, "track_running_stats", False):
        return True
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


class TrainingModes:
    """Asked after each forward pass of training."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, sensitive(model)
        self._at_start = {name for name, module in self._modules.items() if module.training}

    def finding(self) -> Finding | None:
        """A module that is frozen on purpose was in eval mode from the start; one that was not has been forgotten there."""
        if not self._modules:
            return None
        if not self._model.training:
            names = tuple(name for name, module in self._modules.items() if not module.training)
            return _in_eval("the model is in eval mode while it is trained", names) if names else None
        names = tuple(name for name in self._at_start if not self._modules[name].training)
        return _in_eval("in eval mode since a step of this run", names) if names else None


def _in_eval(what: str, names: tuple[str, ...]) -> Finding:
    return Finding("wrong_mode", f"{what}: {listed(names)}", names)


@contextmanager
def watched_evaluation(model: nn.Module) -> Iterator[list[Finding]]:
    """Around the evaluation of one batch, after `model.eval()`; the list is filled at its end."""
    findings: list[Finding] = []
    still = tuple(name for name, module in sensitive(model).items() if module.training)
    if still:
        text = f"after model.eval() these are still in training mode: {listed(still)}"
        findings.append(Finding("wrong_mode", text, still))
    watch = _Watch()
    with watch:
        yield findings
    if not still and watch.active:
        text = f"{' and '.join(sorted(watch.active))} computed as in training during an evaluation, by a call of the function itself"
        findings.append(Finding("wrong_mode", text, tuple(sorted(watch.active))))


class _Watch(TorchFunctionMode):
    """Which functions were told that this is training."""

    def __init__(self) -> None:
        super().__init__()
        self.active: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in DROPOUT and _drops(args, kwargs):
            self.active.add("dropout")
        return func(*args, **kwargs)


def _drops(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """`dropout(input, p=0.5, training=True)`, in either spelling of torch."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return bool(training) and isinstance(p, (int, float)) and p > 0


class MatmulTypes:
    """The types of what matrix products return in the first step."""

    MOST = 8
    """Modules that are looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.dtypes: set[torch.dtype] = set()
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        found = [module for module in model.modules() if isinstance(module, kinds)]
        self._hooks = [module.register_forward_hook(self._keep) for module in found[: self.MOST]]

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self.dtypes.add(output.dtype)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def finding(self, precision: str) -> Finding | None:
        if precision not in ("bf16", "fp16") or not self.dtypes or not self.dtypes <= {torch.float32, torch.float64}:
            return None
        return Finding("precision_not_in_effect", f"loop.precision is {precision}, and the layers compute in float32")
