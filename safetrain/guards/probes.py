"""Statistics of the outputs and gradients of chosen modules: size, share of zeros, distance to the limit of the dtype.

Everything stays on the device. It works without the trainer:

    with Probe(matching(model, ["*.norm"], "modules")) as probe:
        loss = loss_fn(model, batch)
        loss.backward()
    probe.signals(like=loss)

Gradients are watched at the modules' outputs, by hooks on those tensors: a module's own backward hooks would forbid
in-place operations after it. Under the fp16 loss scaler they are the scaled ones, which are what can overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .._private import compiler
from ..tensors.nest import tensors_in

STATISTICS = ("max_abs", "zeros", "saturation")
"""Largest absolute value (NaN and Inf propagate), share of exact zeros, and `max_abs` as a share of the largest number of
the type it was computed in: 1 or more is an overflow."""


class _Seen:
    """Running statistics over all tensors that went through one place."""

    def __init__(self) -> None:
        self.num_values = 0
        self.max_abs: Tensor | None = None
        self.saturation: Tensor | None = None
        self.num_zeros: Tensor | None = None

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        if not values.numel() or values.layout != torch.strided or values.is_nested or values.element_size() == 1:
            return
        values = values.detach()
        # In at least float32, where the largest float16 is an ordinary number.
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        max_abs = torch.linalg.vector_norm(values, float("inf"), dtype=wide)
        saturation = max_abs / torch.finfo(values.dtype).max
        num_zeros = (values == 0).sum()
        self.num_values += values.numel()
        self.max_abs = max_abs if self.max_abs is None else torch.maximum(self.max_abs, max_abs)
        self.saturation = saturation if self.saturation is None else torch.maximum(self.saturation, saturation)
        self.num_zeros = num_zeros if self.num_zeros is None else self.num_zeros + num_zeros

    def signals(self, nothing: Tensor) -> dict[str, Tensor]:
        if self.max_abs is None or self.saturation is None or self.num_zeros is None:
            return dict.fromkeys(STATISTICS, nothing)
        return dict(zip(STATISTICS, (self.max_abs, self.num_zeros / self.num_values, self.saturation), strict=True))


class Probe:
    """Hooks on the modules given, by name, for as long as it is entered.

    A compiled model runs eagerly meanwhile: what it was compiled to has no modules to look into.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._outputs = {name: _Seen() for name in self._modules}
        self._gradients = {name: _Seen() for name in self._modules}
        self._hooks = ExitStack()

    def __enter__(self) -> Probe:
        if compiler.is_in_use():
            self._hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in self._modules.items():
            self._hooks.callback(module.register_forward_hook(self._hook(name)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def signals(self, like: Tensor) -> dict[str, Tensor]:
        """0-d tensors, the same names whatever ran: zeros, of the type and device of `like`, for what did not."""
        nothing = like.new_zeros(())
        found: dict[str, Tensor] = {}
        for name in self._modules:
            found |= {f"{name}.{key}": value for key, value in self._outputs[name].signals(nothing).items()}
            found |= {f"{name}.grad_{key}": value for key, value in self._gradients[name].signals(nothing).items()}
        return found

    def _hook(self, name: str) -> Any:
        outputs, gradients = self._outputs[name], self._gradients[name]

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in tensors_in(output):
                if leaf.is_floating_point():
                    outputs.add(leaf)
                    if leaf.requires_grad:
                        leaf.register_hook(gradients.add)  # type: ignore[no-untyped-call]

        return watch


def by_module(signals: Mapping[str, float], prefix: str) -> dict[str, dict[str, float]]:
    """The numbers of `Probe.signals` on the host, named `prefix.module.statistic`, in one mapping per module."""
    modules: dict[str, dict[str, float]] = {}
    for name, value in signals.items():
        if name.startswith(f"{prefix}."):
            module, _, statistic = name.removeprefix(f"{prefix}.").rpartition(".")
            modules.setdefault(module, {})[statistic] = value
    return modules
