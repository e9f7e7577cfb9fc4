"""Safe variants of elementwise operations.

Each replaces the *input* at singular elements by a harmless constant before the operation, and selects the documented value
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
    """`torch.log`, but below `eps` (default: the dtype's smallest number with a reciprocal) log(eps) with gradient zero.

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
    """`x / y`, but `fill` with gradient zero for both where |y| is below `eps` (default: the dtype's smallest with a reciprocal).

    A quotient that is too large for the dtype becomes its largest number, with gradient zero for both. Where only the derivative
    x/y² is too large, the gradient for y is zero.

    >>> safe.div(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 2.0]))
    tensor([0.0000, 0.0000, 0.5000])
    """
    if isinstance(y, Tensor):
        return _div_by_tensor(x, as_real(y, "div") if y.is_complex() or y.dtype is torch.bool else y, fill, eps)
    if not isinstance(x, Tensor):
        raise UsageError("safe.div got two plain numbers. To fix: pass at least one tensor.")
    x = as_real(x, "div")
    if abs(y) < floor_of(x.dtype, eps):
        return torch.where(torch.isfinite(x), fill, x)
    quotient = x / y
    return torch.where(is_finite_and(torch.isinf(quotient), x), _saturated(quotient), quotient)


def _div_by_tensor(x: Tensor | float, y: Tensor, fill: float, eps: float | None) -> Tensor:
    dtype = result_dtype(x, y)
    x0, y0 = x.detach() if isinstance(x, Tensor) else x, y.detach()
    # A bad numerator stays visible: Inf/1 is Inf, NaN/1 is NaN.
    x_is_finite = torch.isfinite(x0) if isinstance(x0, Tensor) else math.isfinite(x0)
    singular = y0.to(dtype).abs() < floor_of(dtype, eps)
    divisor = torch.where(singular, 1, y0)
    plain = x0 / divisor
    overflow = torch.isinf(plain) & x_is_finite
    steep = torch.isinf(plain / divisor)
    if not isinstance(x, Tensor):
        steep = steep | torch.isinf(1 / divisor / divisor)  # torch computes this by the reciprocal and its derivative
    steep = is_finite_and(steep, plain)
    with_gradient = x / torch.where(singular | overflow | steep, 1, y)
    with_y_fixed = x / torch.where(steep, y0, 1)
    quotient = torch.where(overflow, _saturated(plain), torch.where(steep, with_y_fixed, with_gradient))
    return torch.where(singular & x_is_finite, fill, quotient)


def pow(x: Tensor | float, exponent: Tensor | float, fill: float = 0.0) -> Tensor:
    """`torch.pow`, also where the power or its derivative does not exist; the gradient is zero there.

    Zero to an exponent between 0 and 1 is zero. Zero to a negative exponent (as for `safe.div`, numbers without a reciprocal
    count as zero), and a negative base with a fractional exponent, give `fill`. A power that is too large for the dtype becomes
    its largest number. A base of zero or less gives the exponent no gradient. Integers become floats.

    >>> safe.pow(torch.tensor([0.0, -8.0, 4.0]), 0.5)
    tensor([0., 0., 2.])
    """
    if isinstance(exponent, Tensor):
        exponent = as_real(exponent, "pow")
        if not isinstance(x, Tensor):
            if x > 0:
                return _pow_of_number(x, exponent)
            x = torch.as_tensor(x, dtype=exponent.dtype, device=exponent.device)
        return _pow_of_tensors(as_real(x, "pow"), exponent, fill)
    if not isinstance(x, Tensor):
        raise UsageError("safe.pow got two plain numbers. To fix: pass at least one tensor.")
    x = as_real(x, "pow")
    if exponent == 0 or not math.isfinite(exponent):
        return torch.pow(x, exponent)
    x0 = x.detach()
    plain, slope = torch.pow(x0, exponent), exponent * torch.pow(x0, exponent - 1)
    undefined = torch.isnan(plain)
    if exponent < 0:
        undefined = undefined | (x0.abs() < floor_of(x.dtype))
    constant = is_finite_and(undefined | ~torch.isfinite(plain) | ~torch.isfinite(slope), x0)
    power = torch.pow(torch.where(constant, 1.0, x), exponent)
    return torch.where(constant, torch.where(undefined, fill, _saturated(plain)), power)


def _pow_of_number(x: float, exponent: Tensor) -> Tensor:
    plain = torch.pow(x, exponent.detach())
    overflow = is_finite_and(torch.isinf(plain) | torch.isinf(plain * math.log(x)), exponent)
    return torch.where(overflow, _saturated(plain), torch.pow(x, torch.where(overflow, 0.0, exponent)))


def _pow_of_tensors(x: Tensor, exponent: Tensor, fill: float) -> Tensor:
    """At each element neither operand has a finite gradient, only the exponent, only the base, or both."""
    x0, e0 = x.detach(), exponent.detach()
    plain = torch.pow(x0, e0)
    to_base = torch.where(e0 == 0, 0.0, e0 * torch.pow(x0, e0 - 1))
    to_exponent = plain * torch.log(x0)  # Inf or NaN for a base of zero or less
    finite = torch.isfinite(x0) & torch.isfinite(e0)
    dtype = result_dtype(x, exponent)
    undefined = finite & (torch.isnan(plain) | ((x0.to(dtype).abs() < floor_of(dtype)) & (e0 < 0)))
    base_ok, exponent_ok = torch.isfinite(to_base), torch.isfinite(to_exponent) & (x0 > 0)
    neither = undefined | (finite & (torch.isinf(plain) | ~(base_ok | exponent_ok)))
    only_exponent = finite & ~neither & ~base_ok
    only_base = finite & ~neither & ~exponent_ok
    both = ~(neither | only_exponent | only_base)

    power = torch.pow(torch.where(both, x, 1.0), exponent)
    power = torch.where(only_exponent, torch.pow(torch.where(only_exponent, x0, 1.0), exponent), power)
    power = torch.where(only_base, torch.pow(torch.where(only_base & (e0 != 0), x, 1.0), e0), power)
    return torch.where(neither, torch.where(undefined, fill, _saturated(plain)), power)


def _saturated(x: Tensor) -> Tensor:
    largest = torch.finfo(x.dtype).max
    return x.detach().clamp(-largest, largest)


def exp(x: Tensor) -> Tensor:
    """`torch.exp`, but where it overflows the dtype's largest number with gradient zero.

    >>> safe.exp(torch.tensor([0.0, 1000.0]))
    tensor([1.0000e+00, 3.4028e+38])
    """
    x = as_real(x, "exp")
    # Running the operation is exact for every dtype, device and autocast setting; comparing with a rounded log(max) is not.
    plain = torch.exp(x.detach())
    overflow = is_finite_and(torch.isinf(plain), x)
    return torch.where(overflow, _saturated(plain), torch.exp(torch.where(overflow, 0.0, x)))


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
