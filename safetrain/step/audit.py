"""Is the training state itself still finite?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.collective import gather
from ..optim.ema import Ema
from ..tensors.gradients import numbers_of, peak
from ..tensors.sharded import any_dtensor, is_sharded, local
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
        ignored = self._transaction.born_bad | self._transaction.written_parameters
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


SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
JUMP, FATAL_JUMP = 1e3, 1e6
FLOORS = {"model": 1e-2, "extra": 1e-2, "ema": 1e-2, "optimizer": 1.0}
"""What a tensor that was smaller counts as when jumps are looked for: zeros are meant to grow."""


def is_second_moment(name: str) -> bool:
    return name.startswith("optimizer/") and name.endswith(SECOND_MOMENTS)


def peaks_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each floating-point tensor, or of this process's part of it; both are NaN if one of its values is."""
    spread = any_dtensor(tensors.values())
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = local(tensor) if spread else tensor
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            real = real.float() if real.element_size() == 1 else real  # nothing is defined for float8
            kinds.setdefault((real.device, real.dtype), {})[name] = real
    peaks: dict[str, tuple[float, float]] = {}
    for named in kinds.values():
        peaks.update(zip(named, _ends(list(named.values())), strict=True))
    return peaks


@torch.no_grad()
def _ends(tensors: list[Tensor]) -> Iterable[tuple[float, float]]:
    ends = torch.stack([end for tensor in tensors for end in torch.aminmax(tensor)])
    numbers = iter(ends.cpu().double().numpy().tolist())  # one transfer for each kind of tensor
    return zip(numbers, numbers, strict=True)


def problems_in(peaks: Mapping[str, tuple[float, float]], ignored: Sequence[str]) -> dict[str, str]:
    problems = {}
    for name, (low, high) in peaks.items():
        if not (math.isfinite(low) and math.isfinite(high)) and name not in ignored:
            problems[name] = "holds NaN" if math.isnan(low) else "holds Inf"
        elif low < 0.0 and is_second_moment(name):
            problems[name] = f"a second moment of {low:.3g}"
    return problems


def jumps(
    peaks: Mapping[str, tuple[float, float]],
    before: Mapping[str, tuple[float, float]] | None,
    ignored: Sequence[str],
    factor: float = JUMP,
) -> dict[str, str]:
    """Weights, averages and moments that grew by the factor. Buffers (`ignored`) may: they follow the data."""
    found = {}
    for name, (low, high) in peaks.items():
        floor = FLOORS.get(name.partition("/")[0])
        if before is None or name not in before or floor is None or name in ignored:
            continue
        now, then = max(-low, high), max(-before[name][0], before[name][1])
        if now > factor * max(then, floor):
            found[name] = f"grew from {then:.3g} to {now:.3g}"
    return found


def _has_floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _problem(tensor: Tensor) -> str:
    tensor = numbers_of(tensor)
    num_nan = int(torch.isnan(tensor).sum())
    num_inf = int(torch.isinf(tensor).sum())
    kinds = [f"{count} {kind}" for count, kind in ((num_nan, "NaN"), (num_inf, "Inf")) if count]
    return f"{' and '.join(kinds)} of {tensor.numel()} values" if kinds else ""
