"""Is the training state itself still finite?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .collective import gather
from .ema import Ema
from .gradients import numbers_of, peak
from .sharding import is_sharded, local
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
        return peak([tensor for _, tensor in self._persistent()])

    def bad_state(self) -> dict[str, str]:
        """Names of the non-finite tensors with what is wrong. Reads everything to the host."""
        return self._problems(self._transaction.buffers_now())

    def bad_state_before_step(self) -> dict[str, str]:
        """The same while a step is judged: buffers as they were before its forward pass wrote to them."""
        return self._problems(self._transaction.buffers_before())

    def _problems(self, buffers: list[tuple[str, Tensor]]) -> dict[str, str]:
        written = self._transaction.written_parameters
        labelled = ((name if name in written else f"buffer {name}", buffer) for name, buffer in buffers)
        named = [*self._persistent(), *labelled]
        problems = {name: problem for name, tensor in named if (problem := _problem(tensor))}
        if self._is_sharded:  # each process sees its own part only
            return {name: problem for found in gather(problems) for name, problem in found.items()}
        return problems

    def _persistent(self) -> Iterator[tuple[str, Tensor]]:
        ignored = self._transaction.born_bad | self._transaction.written_parameters
        for name, weight in self._model.named_parameters():
            if name not in ignored and _has_floats(weight):
                yield name, local(weight.detach())
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and _has_floats(value):
                    yield f"optimizer {key} of {self._names.get(id(parameter), 'a parameter')}", local(value)
        if self._ema is not None:
            yield from ((f"ema {name}", local(weight)) for name, weight in self._ema.weights.items())


SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
JUMP, FATAL_JUMP = 1e3, 1e6
FLOORS = {"model": 1e-2, "extra": 1e-2, "ema": 1e-2, "optimizer": 1.0}
"""What a tensor that was smaller counts as when jumps are looked for: zeros are meant to grow."""


def is_second_moment(name: str) -> bool:
    return name.startswith("optimizer/") and name.endswith(SECOND_MOMENTS)


def peaks_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each floating-point tensor, or of this process's part of it; both are NaN if one of its values is."""
    names: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    pairs: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for name, tensor in tensors.items():
        tensor = local(tensor)
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            low, high = torch.aminmax(real.float() if real.element_size() == 1 else real)  # not for float8
            names.setdefault((low.device, low.dtype), []).append(name)
            pairs.setdefault((low.device, low.dtype), []).extend((low, high))
    peaks: dict[str, tuple[float, float]] = {}
    for kind, found in pairs.items():
        rows = torch.stack(found).cpu().double().view(-1, 2).numpy().tolist()  # one transfer for each kind of tensor
        peaks.update((name, (low, high)) for name, (low, high) in zip(names[kind], rows, strict=True))
    return peaks


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
