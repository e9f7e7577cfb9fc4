"""Checks that report which tensor is non-finite, how many values, and where. Each synchronises with the device once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, UsageError
from ..tensors.gradients import peak

_SHOWN = 10  # parameters listed in an error message; the others are counted


def check_tensor(t: Tensor, name: str = "tensor") -> Tensor:
    """Raise `NonFiniteError` with counts, first index and finite range if `t` contains NaN or Inf; else return `t` itself.

    >>> hidden = safe.check_tensor(torch.ones(2, 3), "hidden")
    """
    if not isinstance(t, Tensor):
        raise UsageError(
            f"check_tensor takes a tensor, but {name} is {type(t).__name__}. To fix: check the tensors in it one by one."
        )
    if _is_finite(t):
        return t
    raise NonFiniteError(
        f"{name} is not finite: {_describe(t)}.\n"
        "To fix: find the operation that produced it, with safetrain.forensics.investigate(model, loss_fn, batch) or by "
        "check_tensor on its inputs."
    )


@dataclass(frozen=True)
class GradientProblem:
    """What is wrong with the gradient of one parameter.

    >>> str(safe.check_gradients(torch.nn.Linear(2, 1), raise_on_bad=False)[0])
    'weight: no gradient'
    """

    parameter: str
    kind: Literal["non-finite", "missing"]
    detail: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.detail}"


def check_gradients(model: nn.Module, raise_on_bad: bool = True) -> list[GradientProblem]:
    """The parameters whose gradient is non-finite or missing; call it between `backward()` and `optimizer.step()`.

    Raises `NonFiniteError` naming the non-finite ones, and `UsageError` when there is no gradient at all; with
    `raise_on_bad=False` everything is returned instead. Missing gradients alone are not an error: a part of the model may be
    unused in this step. Frozen parameters are ignored. Changes nothing.

    >>> safe.check_gradients(torch.nn.Linear(2, 1), raise_on_bad=False)[0].kind
    'missing'
    """
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in learning.items() if p.grad is not None}
    missing = [GradientProblem(n, "missing", "no gradient") for n in learning if n not in gradients]
    bad: list[GradientProblem] = []
    largest = peak([_values(gradient) for gradient in gradients.values()])
    if largest is not None and not math.isfinite(float(largest)):
        for name, gradient in gradients.items():
            if not _is_finite(gradient):
                bad.append(GradientProblem(name, "non-finite", _describe(gradient)))
    if raise_on_bad and bad:
        lines = [f"  - {problem}" for problem in bad[:_SHOWN]]
        lines += [f"  - and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        raise NonFiniteError(
            f"{len(bad)} of {len(gradients)} gradients are not finite:\n" + "\n".join(lines) + "\n"
            "To fix: find the operation that produced them, with safetrain.forensics.investigate(model, loss_fn, batch)."
        )
    if raise_on_bad and learning and not gradients:
        raise UsageError("no parameter has a gradient. To fix: call loss.backward() before check_gradients.")
    return [*bad, *missing]


def _values(t: Tensor) -> Tensor:
    """The stored numbers of a tensor (also sparse, complex or float8) in a form that `aminmax` supports."""
    t = t.detach()
    if t.layout is not torch.strided:
        t = _coalesced(t).values()
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    return t.float() if t.is_floating_point() and t.dtype.itemsize == 1 else t  # float8 supports almost no operations


def _coalesced(t: Tensor) -> Tensor:
    return t.to_sparse(layout=torch.sparse_coo).coalesce()


def _is_finite(t: Tensor) -> bool:
    values = _values(t)
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())  # NaN propagates to both


def _describe(t: Tensor) -> str:
    values = _values(t)
    if t.is_complex():
        values = torch.view_as_complex(values).abs()
    finite = torch.isfinite(values)
    counts = {"NaN": torch.isnan(values), "+Inf": values == math.inf, "-Inf": values == -math.inf}
    found = " and ".join(f"{int(where.sum())} {kind}" for kind, where in counts.items() if where.any())
    index = torch.nonzero(~finite)[0]
    first = float(values[tuple(index)])
    if t.layout is not torch.strided:  # an index of the stored values, not of the tensor
        index = torch.cat([_coalesced(t.detach()).indices()[:, index[0]], index[1:]])
    healthy = values[finite]
    span = "no finite values"
    if healthy.numel():
        kind = "magnitudes" if t.is_complex() else "values"
        span = f"finite {kind} from {float(healthy.min()):.6g} to {float(healthy.max()):.6g}"
    return (
        f"{found} of {values.numel()} values, shape {tuple(t.shape)}, {str(t.dtype).removeprefix('torch.')}, "
        f"first bad index {tuple(index.tolist())} ({first}), {span}"
    )
