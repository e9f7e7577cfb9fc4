"""Every safe operation with torch's own, healthy inputs, and inputs at its singular point."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from safetrain import safe

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TINY, MAX = "log(tiny)", "max"  # depend on the dtype


def smallest(dtype):
    """The smallest number that is not subnormal, or in float16 that has a finite reciprocal."""
    return 1.5318394e-5 if dtype is torch.float16 else torch.finfo(dtype).tiny


@dataclass(frozen=True)
class Case:
    name: str
    safe: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    healthy: Callable[[], tuple[Tensor, ...]]
    """Float64 inputs at which the plain operation is well-behaved in every dtype."""
    singular: tuple[list, ...]
    """Inputs of which every element, or row, is a singular point."""
    value: list | float | str
    """What the safe operation returns for `singular`."""
    plain_fails: bool = True
    """Whether torch's own value or gradient is non-finite there, in float32."""

    def expected(self, dtype):
        numbers = {TINY: math.log(smallest(dtype)), MAX: torch.finfo(dtype).max}
        value = numbers[self.value] if isinstance(self.value, str) else self.value
        return torch.tensor(value, dtype=torch.float64).to(dtype)

    def inputs(self, dtype, healthy=True):
        tensors = self.healthy() if healthy else [torch.tensor(each, dtype=torch.float64) for each in self.singular]
        return [t.to(dtype).requires_grad_() for t in tensors]


def positive(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 3 + 0.1


def signed(*shape):
    return positive(*shape) * torch.where(torch.rand(*shape) < 0.5, -1.0, 1.0)


def inner(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 1.8 - 0.9


MASK = torch.tensor([True, False, True, True, False])
TARGET = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
NOTHING = torch.zeros(3, dtype=torch.bool)


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def every(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "-"))


def gradients(function, inputs, create_graph=False):
    """The function's value, and the gradients of its sum."""
    out = function(*inputs)
    return out, torch.autograd.grad(out.sum(), inputs, create_graph=create_graph)


CASES = [
    Case("log", safe.log, torch.log, lambda: (positive(4, 5),), ([0.0, -0.0, -3.0],), TINY),
    Case("sqrt", safe.sqrt, torch.sqrt, lambda: (positive(4, 5),), ([0.0, -0.0, -3.0],), 0.0),
    Case("div", safe.div, torch.div, lambda: (signed(4, 5), signed(5)), ([0.0, 1.0, -2.0], [0.0, 0.0, -0.0]), 0.0),
    Case("div by", lambda y: safe.div(1.0, y), lambda y: 1.0 / y, lambda: (signed(4),), ([0.0, -0.0],), 0.0),
    Case("div fill", lambda x, y: safe.div(x, y, fill=7), torch.div, lambda: (signed(4), signed(4)), ([1.0], [0.0]), 7.0),
    Case("pow half", lambda x: safe.pow(x, 0.5), lambda x: x**0.5, lambda: (positive(4, 5),), ([0.0, -0.0, -8.0],), 0.0),
    Case("pow third", lambda x: safe.pow(x, 1 / 3), lambda x: x ** (1 / 3), lambda: (positive(9),), ([0.0, -8.0],), 0.0),
    Case("pow inverse", lambda x: safe.pow(x, -1), lambda x: x**-1, lambda: (signed(4, 5),), ([0.0, -0.0],), 0.0),
    Case("pow 1.5", lambda x: safe.pow(x, 1.5), lambda x: x**1.5, lambda: (positive(4, 5),), ([-1.0, -8.0],), 0.0),
    Case("pow -0.5", lambda x: safe.pow(x, -0.5), lambda x: x**-0.5, lambda: (positive(9),), ([0.0, -8.0],), 0.0),
    Case("pow tensors", safe.pow, torch.pow, lambda: (positive(4, 5), signed(5)),
         ([0.0, -8.0, 0.0, 0.0, -1.0], [0.5, 0.5, -1.0, -0.5, -1.5]), 0.0),
    Case("pow of number", lambda e: safe.pow(2.0, e), lambda e: torch.pow(2.0, e), lambda: (signed(9),), ([],), [], False),
    Case("pow of zero", lambda e: safe.pow(0.0, e), lambda e: torch.pow(0.0, e), lambda: (positive(3) + 1,), ([-1.0],), 0.0),
    Case("pow overflow", lambda e: safe.pow(2.0, e), lambda e: torch.pow(2.0, e), lambda: (signed(3),), ([2000.0],), MAX),
    Case("pow large", lambda x: safe.pow(x, 400), lambda x: x**400, lambda: (inner(9),), ([60.0, -60.0],), MAX),
    Case("exp", safe.exp, torch.exp, lambda: (signed(4, 5),), ([1000.0, 800.0],), MAX),
    Case("acos", safe.acos, torch.acos, lambda: (inner(4, 5),), ([1.0, -1.0, 1.5, -7.0],), [0.0, math.pi, 0.0, math.pi]),
    Case("asin", safe.asin, torch.asin, lambda: (inner(4, 5),), ([1.0, -3.0],), [math.pi / 2, -math.pi / 2]),
    Case("norm", safe.norm, torch.linalg.vector_norm, lambda: (signed(4, 5),), ([0.0, 0.0],), 0.0, False),
    Case("norm rows", lambda x: safe.norm(x, dim=-1), lambda x: x.pow(2).sum(-1).sqrt(),
         lambda: (torch.tensor([[3.0, 4.0], [-4.0, 3.0]], dtype=torch.float64),), ([[0.0, 0.0], [0.0, 0.0]],), 0.0),
    Case("norm 1.5", lambda x: safe.norm(x, 1.5, dim=(0, 2), keepdim=True), lambda x: torch.linalg.vector_norm(x, 1.5, (0, 2), True),
         lambda: (signed(2, 3, 4),), ([[[0.0], [0.0]]],), 0.0, False),
    Case("norm inf", lambda x: safe.norm(x, math.inf, 1), lambda x: torch.linalg.vector_norm(x, math.inf, 1),
         lambda: (signed(3, 4),), ([[0.0, 0.0]],), 0.0, False),
    Case("normalize", safe.normalize, lambda x: x / torch.linalg.vector_norm(x, 2, 1, keepdim=True),
         lambda: (signed(4, 5, 3),), ([[0.0, 0.0]],), 0.0),
    Case("cosine_similarity", safe.cosine_similarity, F.cosine_similarity,
         lambda: (signed(4, 5), signed(4, 5)), ([[0.0, 0.0]], [[0.0, 0.0]]), 0.0, False),
    Case("std", safe.std, torch.std, lambda: (signed(4, 5),), ([2.0, 2.0, 2.0],), 0.0, False),
    Case("std biased", lambda x: safe.std(x, (0, -1), unbiased=False), lambda x: torch.std(x, (0, -1), unbiased=False),
         lambda: (signed(2, 3, 4),), ([[[2.0], [3.0]]],), 0.0, False),
    Case("std rows", lambda x: safe.std(x, dim=1, keepdim=True),
         lambda x: x.var(1, keepdim=True).sqrt() if x.shape[1] == 1 else x.std(1, keepdim=True),
         lambda: (signed(4, 5),), ([[2.0], [3.0]],), 0.0),
    Case("masked_mean", lambda x: safe.masked_mean(x, MASK[: x.shape[-1]] if x.shape[-1] == 5 else NOTHING, dim=-1),
         lambda x: x[..., MASK].mean(-1) if x.shape[-1] == 5 else x[NOTHING].mean(),
         lambda: (signed(4, 5),), ([1.0, 2.0, 3.0],), 0.0),
    Case("softmax", lambda x: safe.softmax(x, mask=MASK if x.shape[-1] == 5 else NOTHING),
         lambda x: torch.softmax(x.masked_fill(~(MASK if x.shape[-1] == 5 else NOTHING), -math.inf), -1),
         lambda: (signed(4, 5),), ([[1.0, 2.0, 3.0]],), 0.0),
    Case("softmax without mask", lambda x: safe.softmax(x, dim=0), lambda x: torch.softmax(x, 0),
         lambda: (signed(4, 5),), ([-math.inf, -math.inf],), 0.0),
    Case("log_softmax", lambda x: safe.log_softmax(x, dim=0), lambda x: torch.log_softmax(x, 0),
         lambda: (signed(4, 5),), ([-math.inf, -math.inf],), TINY),
    Case("bce", lambda x: safe.bce(x, TARGET[: len(x)]),
         lambda x: F.binary_cross_entropy_with_logits(x, TARGET[: len(x)].to(x.dtype)), lambda: (signed(5),), ([],), 0.0),
]  # fmt: skip
# At ±1 there is no finite value for atanh, and at 0 and 1 none for the cross-entropy: their tests are written out.
PROBABILITIES = Case(
    "bce of probabilities",
    lambda p: safe.bce(p, TARGET, from_logits=False),
    lambda p: F.binary_cross_entropy(p, TARGET.to(p.dtype)),
    lambda: (torch.rand(5, dtype=torch.float64) * 0.8 + 0.1,),
    ([],),
    0.0,
)
ATANH = Case("atanh", safe.atanh, torch.atanh, lambda: (inner(4, 5),), ([],), 0.0)
HEALTHY = [*CASES, ATANH, PROBABILITIES]
