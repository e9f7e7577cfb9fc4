"""Is the training state itself still finite?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.comm import gather
from ..optim.ema import Ema
from ..tensors.gradients import numbers_of, peak
from ..tensors.sharded import is_sharded, local
from .transaction import Transaction


class Audit:
    """Looks at parameters, optimizer state, moving average and buffers; changes nothing."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, transaction: Transaction, ema: Ema | None) -> None:
        self._model, self._optimizer, self._transaction, self._ema = model, optimizer, transaction, ema
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._is_sharded = is_sharded(model)

    def state_peak(self) -> Tensor | None:
        """Largest absolute value over parameters, optimizer state and moving average; stays on the device.

        Parameters that forward writes to are looked at with the buffers.
        """
        return peak([tensor for *_, tensor in self._persistent()])

    def bad_state(self) -> dict[str, str]:
        """Names of the non-finite tensors with what is wrong. Reads everything to the host."""
        return self._problems(self._transaction.buffers_now())

    def bad_state_before_step(self) -> dict[str, str]:
        """The same while a step is judged: buffers as they were before its forward pass wrote to them."""
        return self._problems(self._transaction.buffers_before())

    def _problems(self, buffers: list[tuple[str, Tensor]]) -> dict[str, str]:
        written = self._transaction.written_parameters
        labelled = ((name if name in written else f"buffer {name}", buffer) for name, buffer in buffers)
        problems = {
            self._name(what, owner): problem
            for what, owner, tensor in self._persistent()
            if (problem := _problem(local(tensor)))
        }
        problems |= {name: problem for name, tensor in labelled if (problem := _problem(tensor))}
        if self._is_sharded:  # each process sees its own part only
            return {name: problem for found in gather(problems) for name, problem in found.items()}
        return problems

    def _persistent(self) -> Iterator[tuple[str, Any, Tensor]]:
        """Tensors with what they are and whose: their names are made up only for those that are bad."""
        ignored = self._transaction.nonfinite_by_design | self._transaction.written_parameters
        for name, weight in self._model.named_parameters():
            if name not in ignored and _has_floats(weight):
                yield "", name, weight.detach()
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and _has_floats(value):
                    yield key, parameter, value
        if self._ema is not None:
            yield from (("ema", name, weight) for name, weight in self._ema.weights.items())

    def _name(self, what: str, owner: Any) -> str:
        if isinstance(owner, str):
            return f"{what} {owner}".lstrip()
        return f"optimizer {what} of {self._names.get(id(owner), 'a parameter')}"


def _has_floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _problem(tensor: Tensor) -> str:
    largest = peak([tensor])  # far cheaper than to count
    if largest is None or bool(torch.isfinite(largest)):
        return ""
    tensor = numbers_of(tensor)
    num_nan = int(torch.isnan(tensor).sum())
    num_inf = int(torch.isinf(tensor).sum())
    kinds = [f"{count} {kind}" for count, kind in ((num_nan, "NaN"), (num_inf, "Inf")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel()} values" if kinds else ""
