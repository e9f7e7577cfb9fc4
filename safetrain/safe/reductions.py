"""Safe variants of norms, means and standard deviations: zero vectors, single elements, empty selections, squares that over- or underflow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import UsageError
from .elementwise import div
from .inputs import as_mask, as_real, broadcast

Dims = int | tuple[int, ...] | list[int] | None


def norm(x: Tensor, p: float = 2.0, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """`torch.norm` of vectors (`torch.linalg.vector_norm`), but with gradient zero at the zero vector, also for the second derivative.

    Where only the powers over- or underflow and the norm itself fits the dtype, it is computed on a scaled vector. The norm
    of no elements is zero. `p` is positive and may be `math.inf`.

    >>> safe.norm(torch.tensor([[0.0, 0.0], [3e30, 4e30]]), dim=1)
    tensor([0.0000e+00, 5.0000e+30])
    """
    if not p > 0:
        raise UsageError(f"safe.norm takes a positive p, but got {p}. To fix: use torch.linalg.vector_norm for it.")
    x = as_real(x, "norm")
    if x.numel() == 0:
        return _sum(x, dim, keepdim)
    zero = _peak(x, dim, keepdim=True) == 0
    away_from_zero = torch.where(zero, 1.0, x)
    length = _rescaled(lambda v, keep: torch.linalg.vector_norm(v, p, dim, keep), away_from_zero, dim, keepdim)
    return torch.where(zero if keepdim else _squeeze(zero, dim), 0.0, length)


def std(
    x: Tensor, dim: Dims = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> Tensor:
    """`torch.std`, but zero with gradient zero when there are too few elements, or when they are all equal.

    Where only the squares over- or underflow, it is computed on scaled elements. `correction` overrides `unbiased`.

    >>> safe.std(torch.tensor([[5.0], [7.0]]), dim=1)
    tensor([0., 0.])
    """
    x = as_real(x, "std")
    correction = int(unbiased) if correction is None else correction
    if x.numel() == 0 or _count(x, dim) - correction <= 0:
        return _sum(x - x, dim, keepdim)  # zero with gradient zero; NaN and Inf give NaN
    return _rescaled(lambda v, keep: torch.std(v, dim, correction=correction, keepdim=keep), x, dim, keepdim)


def masked_mean(x: Tensor, mask: Tensor, dim: Dims = None, keepdim: bool = False, empty: float = 0.0) -> Tensor:
    """Mean of the elements where `mask` is True; `empty` with gradient zero where there are none.

    Masked elements are ignored: NaN in the padding has no effect. `x` and `mask` broadcast.

    >>> safe.masked_mean(torch.tensor([[1.0, 3.0], [9.0, 9.0]]), torch.tensor([[True, True], [False, False]]), dim=1)
    tensor([2., 0.])
    """
    x, mask = broadcast(as_real(x, "masked_mean"), as_mask(mask, "masked_mean"))
    kept = torch.where(mask, x, 0.0)
    # A sum of half-precision numbers overflows long before their mean does.
    wide = torch.promote_types(x.dtype, torch.float32)
    count = mask.sum(dim=_all_if_none(x, dim), keepdim=keepdim)
    return div(_sum(kept, dim, keepdim, dtype=wide), count, fill=empty).to(x.dtype)


def normalize(x: Tensor, p: float = 2.0, dim: int | None = None, eps: float | None = None) -> Tensor:
    """`torch.nn.functional.normalize`, but zero with gradient zero where the norm is below `eps` (default: the dtype's smallest
    number with a reciprocal). Shorter vectors than torch's fixed eps of 1e-12 get length one, in every dtype.

    `dim` is torch's 1 unless given, or the only dimension of a vector.

    >>> safe.normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    x = as_real(x, "normalize")
    return div(x, norm(x, p, _one_dim(x, dim), keepdim=True), eps=eps)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int | None = None, eps: float | None = None) -> Tensor:
    """`torch.nn.functional.cosine_similarity`, but zero with gradient zero for both where one norm is below `eps` (default: the
    dtype's smallest number with a reciprocal).

    `dim` is torch's 1 unless given, or the only dimension of a vector. Rounding may exceed ±1 as in torch, which `safe.acos` accepts.

    >>> safe.cosine_similarity(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([0.7071, 0.0000])
    """
    x1, x2 = as_real(x1, "cosine_similarity"), as_real(x2, "cosine_similarity")
    common = torch.promote_types(x1.dtype, x2.dtype)
    x1, x2 = broadcast(x1.to(common), x2.to(common))
    dim = _one_dim(x1, dim)
    return (normalize(x1, dim=dim, eps=eps) * normalize(x2, dim=dim, eps=eps)).sum(dim)


def _rescaled(statistic: Callable[[Tensor, bool], Tensor], x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    """A statistic with f(x) = s f(x/s), computed with s = max |x| where it over- or underflows on x itself, else with s = 1.

    Dividing and multiplying by 1 is exact. As the statistic is homogeneous, a constant s gives the correct gradient.
    """
    plain = statistic(x.detach(), True)
    peak = _peak(x, dim, keepdim=True)
    rescale = (torch.isinf(plain) | (plain == 0)) & torch.isfinite(peak) & (peak > 0)
    scale = torch.where(rescale, peak, 1.0)
    result = statistic(x / scale, keepdim)
    return result * (scale if keepdim else _squeeze(scale, dim))


def _peak(x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    return x.detach().abs().amax(dim=_all_if_none(x, dim), keepdim=keepdim)


def _sum(x: Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    return x.sum(dim=_all_if_none(x, dim), keepdim=keepdim, dtype=dtype)


def _squeeze(x: Tensor, dim: Dims) -> Tensor:
    return x.squeeze(_all_if_none(x, dim))


def _all_if_none(x: Tensor, dim: Dims) -> tuple[int, ...]:
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    return dims or tuple(range(x.dim()))


def _count(x: Tensor, dim: Dims) -> int:
    count = 1
    for d in _all_if_none(x, dim):  # math.prod would break the graph under compile
        count *= x.shape[d] if x.dim() else 1
    return count


def _one_dim(x: Tensor, dim: int | None) -> int:
    return min(1, x.dim() - 1) if dim is None else dim
