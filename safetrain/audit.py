"""Is the training state itself still finite?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .ema import Ema
from .gradients import peak
from .transaction import Transaction


class Audit:
    """Looks at parameters, optimizer state, moving average and buffers; changes nothing."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, transaction: Transaction, ema: Ema | None) -> None:
        self._model, self._optimizer, self._transaction, self._ema = model, optimizer, transaction, ema
        self._names = {id(p): name for name, p in model.named_parameters()}

    def state_peak(self) -> Tensor | None:
        """Largest absolute value over parameters, optimizer state and moving average; stays on the device."""
        return peak([tensor for _, tensor in self._persistent()])

    def bad_state(self) -> dict[str, str]:
        """Names of the non-finite tensors with what is wrong. Reads everything to the host."""
        return self._problems(self._transaction.buffers_now())

    def bad_state_before_step(self) -> dict[str, str]:
        """The same while a step is judged: buffers as they were before its forward pass wrote to them."""
        return self._problems(self._transaction.buffers_before())

    def _problems(self, buffers: list[tuple[str, Tensor]]) -> dict[str, str]:
        named = [*self._persistent(), *((f"buffer {name}", buffer) for name, buffer in buffers)]
        return {name: problem for name, tensor in named if (problem := _problem(tensor))}

    def _persistent(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._model.named_parameters():
            yield name, weight.detach()
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    yield f"optimizer {key} of {self._names.get(id(parameter), 'a parameter')}", value
        if self._ema is not None:
            yield from ((f"ema {name}", weight) for name, weight in self._ema.weights.items())


def _problem(tensor: Tensor) -> str:
    num_nan = int(torch.isnan(tensor).sum())
    num_inf = int(torch.isinf(tensor).sum())
    kinds = [f"{count} {kind}" for count, kind in ((num_nan, "NaN"), (num_inf, "Inf")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel()} values" if kinds else ""
