"""Safe variants of elementwise operations.

Each replaces the *input* at the singular places by a harmless constant before the operation, and selects the documented value
after it. Selecting alone is not enough: the backward pass of `where(x > 0, x.sqrt(), 0)` still multiplies 0 by Inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UsageError
from .inputs import as_real, floor_of, is_finite_and, result_dtype


def log(x: Tensor, eps: float | None = None) -> Tensor:
    """`torch.log`, but below `eps` (default: the dtype's smallest normal number) log(eps) with gradient zero.

    >>> safe.log(torch.tensor([0.0, 1.0]))
    tensor([-87.3365,   0.0000])
    """
    x = as_real(x, "log")
    floor = floor_of(x.dtype, eps)
    return torch.log(torch.where(is_finite_and(x < floor, x), floor, x))


def sqrt(x: Tensor) -> Tensor:
    """`torch.sqrt`, but zero with gradient zero for zero and negative numbers.

    >>> safe.sqrt(torch.tensor([-1e-9, 0.0, 4.0]))
    tensor([0., 0., 2.])
    """
    x = as_real(x, "sqrt")
    singular = is_finite_and(x <= 0, x)
    return torch.where(singular, 0.0, torch.sqrt(torch.where(singular, 1.0, x)))


def div(x: Tensor | float, y: Tensor | float, fill: float = 0.0, eps: float | None = None) -> Tensor:
    """`x / y`, but `fill` with gradient zero for both where |y| is below `eps` (default: the dtype's smallest normal number).

    A quotient, or its gradient x/y², that is too large for the dtype is not touched: give an `eps` that suits the data.

    >>> safe.div(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 2.0]))
    tensor([0.0000, 0.0000, 0.5000])
    """
    if isinstance(y, Tensor):
        y = as_real(y, "div") if y.is_complex() or y.dtype is torch.bool else y
        dtype = result_dtype(x, y)
        singular = y.detach().to(dtype).abs() < floor_of(dtype, eps)
        quotient = x / torch.where(singular, 1, y)
        # A bad numerator stays visible: Inf/1 and NaN/1 are what they were.
        numerator_is_finite = torch.isfinite(x) if isinstance(x, Tensor) else math.isfinite(x)
        return torch.where(singular & numerator_is_finite, fill, quotient)
    if not isinstance(x, Tensor):
        raise UsageError("safe.div got two plain numbers. To fix: pass at least one tensor.")
    x = as_real(x, "div")
    if abs(y) < floor_of(x.dtype, eps):
        return torch.where(torch.isfinite(x), fill, x)
    return x / y


def pow(x: Tensor | float, exponent: Tensor | float, fill: float = 0.0) -> Tensor:
    """`torch.pow`, also where the power or its derivative does not exist; the gradient is zero there.

    Zero to an exponent between 0 and 1 is zero. Zero to a negative exponent (subnormal numbers count as zero), and a negative
    base with a fractional exponent, give `fill`. A base of zero or less passes no gradient to the exponent. Integers become floats.

    >>> safe.pow(torch.tensor([0.0, -8.0, 4.0]), 0.5)
    tensor([0., 0., 2.])
    """
    if isinstance(exponent, Tensor):
        exponent = as_real(exponent, "pow")
        if not isinstance(x, Tensor):
            if x > 0:
                return torch.pow(x, exponent)
            x = torch.as_tensor(x, dtype=exponent.dtype, device=exponent.device)
        return _pow_of_tensors(as_real(x, "pow"), exponent, fill)
    if not isinstance(x, Tensor):
        raise UsageError("safe.pow got two plain numbers. To fix: pass at least one tensor.")
    x = as_real(x, "pow")
    if exponent == 0 or (exponent >= 1 and exponent % 1 == 0) or not math.isfinite(exponent):
        return torch.pow(x, exponent)
    undefined = torch.zeros_like(x, dtype=torch.bool)
    if exponent % 1 != 0:
        undefined = is_finite_and(x < 0, x)
    if exponent < 0:
        undefined = undefined | (x.abs() < floor_of(x.dtype))
    steep = x == 0 if 0 < exponent < 1 else undefined
    power = torch.pow(torch.where(undefined | steep, 1.0, x), exponent)
    return torch.where(undefined, fill, torch.where(steep, 0.0, power))


def _pow_of_tensors(x: Tensor, exponent: Tensor, fill: float) -> Tensor:
    fractional = (exponent - exponent.trunc()).abs() > 0  # False for NaN and Inf
    below_zero = is_finite_and(x < 0, x)
    dtype = result_dtype(x, exponent)
    pole = (x.detach().to(dtype).abs() < floor_of(dtype)) & is_finite_and(exponent < 0, exponent)
    undefined = (below_zero & fractional) | pole
    steep = (x == 0) & (exponent > 0) & (exponent < 1)
    base = torch.where(undefined | steep, 1.0, x)
    # The derivative by the exponent holds log(base): only positive bases may meet an exponent that learns.
    fixed = base <= 0
    learning = torch.pow(torch.where(fixed, 1.0, base), exponent)
    constant = torch.pow(torch.where(fixed & (exponent != 0), base, 1.0), exponent.detach())
    power = torch.where(fixed, constant, learning)
    return torch.where(undefined, fill, torch.where(steep, 0.0, power))


def exp(x: Tensor) -> Tensor:
    """`torch.exp`, but where it overflows the dtype's largest number with gradient zero.

    >>> safe.exp(torch.tensor([0.0, 1000.0]))
    tensor([1.0000e+00, 3.4028e+38])
    """
    x = as_real(x, "exp")
    # Asking the operation itself is exact for every dtype, device and autocast setting; a rounded log(max) is not.
    plain = torch.exp(x.detach())
    overflow = is_finite_and(torch.isinf(plain), x)
    return torch.where(overflow, torch.finfo(plain.dtype).max, torch.exp(torch.where(overflow, 0.0, x)))


def acos(x: Tensor) -> Tensor:
    """`torch.acos`, but with gradient zero at ±1, and beyond ±1 the value at ±1.

    >>> safe.acos(torch.tensor([1.0001, 1.0, 0.0]))
    tensor([0.0000, 0.0000, 1.5708])
    """
    return _inside_one(torch.acos, as_real(x, "acos"), edge=1.0)


def asin(x: Tensor) -> Tensor:
    """`torch.asin`, but with gradient zero at ±1, and beyond ±1 the value at ±1.

    >>> safe.asin(torch.tensor([-1.0001, 1.0, 0.0]))
    tensor([-1.5708,  1.5708,  0.0000])
    """
    return _inside_one(torch.asin, as_real(x, "asin"), edge=1.0)


def atanh(x: Tensor) -> Tensor:
    """`torch.atanh`, but at and beyond ±1 the value at the last number before ±1, with gradient zero.

    >>> safe.atanh(torch.tensor([-2.0, 0.0, 1.0]))
    tensor([-8.6643,  0.0000,  8.6643])
    """
    x = as_real(x, "atanh")
    return _inside_one(torch.atanh, x, edge=1 - torch.finfo(x.dtype).eps / 2)


def _inside_one(function: Callable[[Tensor], Tensor], x: Tensor, edge: float) -> Tensor:
    outside = is_finite_and(x.abs() >= 1, x)
    at_edge = function(x.detach().clamp(-edge, edge))
    return torch.where(outside, at_edge, function(torch.where(outside, 0.0, x)))
