"""Searches for inputs and weights at which an operation of the step is undefined or overflows, along the gradient of
its operand.

Every operation that has a singular point is watched in one forward pass. Then the inputs are pushed towards that point within the range of
the data, and the weights with them, as training might do. What is reached is only a suspicion: the step is then investigated as it would be
after a bad step, and reported if it really is not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..forensics.api_names import api_name
from ..forensics.frames import Place, stack, user_place
from ..tensors.nest import map_tensors
from ..tensors.rng import RandomState

NUM_INPUTS, NUM_WEIGHTS = 10, 150
"""Pushes of the inputs alone, and of inputs and weights together."""
PUSH = 0.15
"""Of the range of an input, and of the typical size of a weight, in each push: weights may grow a few dozen times, as in a long training."""
MOST_TURNS = 2
LEAST_SHARE = 1e-6
"""Of a push, below which a point that is stepped over is not approached any further."""
BOUNDED = ((0.0, 1.0), (-1.0, 1.0), (0.0, 255.0))
"""Ranges that data does not leave: of images, audio and probabilities."""


def _above_zero(x: Tensor) -> Tensor:
    """In logarithms, so that a probability of 1e-30 is on its way to 0."""
    least = x.amin()
    return torch.where(least > 0, least.clamp_min(torch.finfo(x.dtype).tiny).log() + 110.0, least)


def _divisor(x: Tensor) -> Tensor:
    return _above_zero(x.abs())


def _exponent(x: Tensor) -> Tensor:
    return math.log(torch.finfo(x.dtype).max) - x.amax()


GAPS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "digamma"), _above_zero),
    **dict.fromkeys(("exp", "expm1", "sinh", "cosh"), _exponent),
    **dict.fromkeys(("acos", "asin", "arccos", "arcsin", "atanh", "arctanh", "erfinv"), lambda x: 1.0 - x.abs().amax()),
    "exp2": lambda x: math.log2(torch.finfo(x.dtype).max) - x.amax(),
    "log1p": lambda x: _above_zero(x + 1.0),
    "logit": lambda x: torch.minimum(_above_zero(x), _above_zero(1.0 - x)),
    "reciprocal": _divisor,
}
"""How far the first operand of a function is from its singular point; 0 or less once it is there."""


@dataclass
class Risk:
    """An operation with a singular point."""

    name: str
    place: Place
    gap: Tensor
    turn: int = 0
    """Which of the operations of this name at this place, as far as they are told apart."""

    @property
    def key(self) -> tuple[str, Place, int]:
        return self.name, self.place, self.turn


class Operands(TorchFunctionMode):
    """Watches one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.risks: list[Risk] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = api_name(func) or ""
        operand, gap = _operand(name, func, args)
        if operand is not None and gap is not None and (place := user_place(stack())) is not None:
            turn = sum((risk.name, risk.place) == (name, place) for risk in self.risks)
            self.risks.append(Risk(name, place, gap(operand), min(turn, MOST_TURNS)))
        return func(*args, **kwargs)


def _operand(name: str, func: Any, args: Sequence[Any]) -> tuple[Tensor | None, Callable[[Tensor], Tensor] | None]:
    gap: Callable[[Tensor], Tensor] | None = GAPS.get(name)
    index = 0
    if name == "div" and len(args) > 1:
        gap, index = _divisor, 0 if getattr(func, "__name__", "").startswith("__r") else 1
    elif name == "pow" and len(args) > 1 and isinstance(args[1], (int, float)):
        if float(args[1]).is_integer() and args[1] > 0:
            return None, None
        gap = _divisor if float(args[1]).is_integer() else _above_zero
    operand = args[index] if len(args) > index else None
    if (
        not isinstance(operand, Tensor)
        or not operand.is_floating_point()
        or not operand.requires_grad
        or not operand.numel()
    ):
        return None, None
    return operand, gap


@dataclass
class Reached:
    """A singular point that was reached, for the step to be investigated there: the weights of the model are those."""

    risk: Risk
    batch: Any
    weight_change: float
    """Relative to the size of the weights; 0 if the inputs alone were enough."""


@dataclass
class Search:
    model: nn.Module
    loss: Callable[[Any], Tensor]
    """Of a batch, with its graph."""
    batch: Any
    deadline: float
    num_risks: int = 0

    def __post_init__(self) -> None:
        self._random = RandomState.capture()

    def run(self) -> Iterator[Reached]:
        weights = [p for p in self.model.parameters() if p.requires_grad and p.is_floating_point()]
        start = [weight.detach().clone() for weight in weights]
        risks = self._watch(self.batch)
        places = dict.fromkeys(risk.key for risk in risks)
        self.num_risks = len(places)
        for index, key in enumerate(places):
            left = self.deadline - time.perf_counter()
            if left <= 0:
                return
            until = time.perf_counter() + left / (len(places) - index)
            reached = self._push(key, weights, start, until)
            if reached is not None:
                yield reached
            with torch.no_grad():
                for weight, value in zip(weights, start, strict=True):
                    weight.copy_(value)

    def _watch(self, batch: Any) -> list[Risk]:
        operands = Operands()
        self._random.restore()  # else every push would be judged by other noise
        with operands, torch.enable_grad():
            self.loss(batch)
        return operands.risks

    def _push(
        self, key: tuple[str, Place, int], weights: list[nn.Parameter], start: list[Tensor], until: float
    ) -> Reached | None:
        batch, inputs = self._free_inputs()
        directions: list[Tensor | None] = []
        least, share, nearest = math.inf, 1.0, list[Tensor]()
        for turn in range(NUM_INPUTS + NUM_WEIGHTS):
            if time.perf_counter() > until:
                return None
            found = [risk for risk in self._watch(batch) if risk.key == key]
            if not found:
                return None
            risk = min(found, key=lambda risk: float(risk.gap))
            gap = float(risk.gap)
            if not gap > 0:
                change = sum(float((w.detach() - s).square().sum()) for w, s in zip(weights, start, strict=True))
                size = sum(float(s.square().sum()) for s in start)
                return Reached(
                    risk, map_tensors(batch, lambda t: t.detach().clone()), math.sqrt(change / max(size, 1e-12))
                )
            moved = [*(i[0] for i in inputs), *weights]
            if gap > least and share > LEAST_SHARE and len(nearest) == len(moved):  # too far: back, and half as far
                share *= 0.5
                with torch.no_grad():
                    for tensor, value in zip(moved, nearest, strict=True):
                        tensor.copy_(value)
                self._move(inputs, weights, directions, PUSH * share)
                continue
            share = min(1.0, 2 * share) if gap < least else share
            least, nearest = gap, [tensor.detach().clone() for tensor in moved]
            variables = [i[0] for i in inputs] + (list(weights) if turn >= NUM_INPUTS or not inputs else [])
            gradients = torch.autograd.grad(risk.gap, variables, allow_unused=True)
            signs: list[Tensor | None] = [
                None if gradient is None else gradient.nan_to_num().sign() for gradient in gradients
            ]
            if all(sign is None or not bool(sign.any()) for sign in signs):
                signs = directions  # a value that is nearly 0 has lost its gradient: go on as before
            directions = signs
            if len(signs) != len(variables):
                if turn < NUM_INPUTS and inputs:
                    inputs = []  # the inputs do not reach it: only the weights are left
                    continue
                return None
            self._move(inputs, weights, signs, PUSH * share)
        return None

    @staticmethod
    @torch.no_grad()
    def _move(
        inputs: list[tuple[Tensor, float, float]],
        weights: list[nn.Parameter],
        signs: Sequence[Tensor | None],
        share: float,
    ) -> None:
        for (tensor, low, high), sign in zip(inputs, signs, strict=False):
            if sign is not None:
                tensor.sub_(share * (high - low) * sign).clamp_(low, high)
        for weight, sign in zip(weights, signs[len(inputs) :], strict=False):
            if sign is not None and weight.numel() > 1:  # a temperature or a scale is not a matter of training for long
                weight.sub_(share * weight.square().mean().sqrt().clamp_min(0.01) * sign)

    def _free_inputs(self) -> tuple[Any, list[tuple[Tensor, float, float]]]:
        """A copy of the batch whose numbers can be pushed, each within the range of its field."""
        inputs: list[tuple[Tensor, float, float]] = []

        def freed(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor.clone()
            copy = tensor.detach().clone().requires_grad_()
            inputs.append((copy, *plausible(tensor)))
            return copy

        return map_tensors(self.batch, freed), inputs


def plausible(values: Tensor) -> tuple[float, float]:
    """Data that fills a usual range stays in it; other data may go on for half of its own."""
    finite = values.detach().float()
    low, high = float(finite.amin()), float(finite.amax())
    for least, most in BOUNDED:
        if least <= low and high <= most and high - low > 0.5 * (most - least):
            return least, most
    return low - 0.5 * (high - low), high + 0.5 * (high - low)
