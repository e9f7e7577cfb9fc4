"""Safe variants of softmax and binary cross-entropy: fully masked rows, saturated probabilities, empty batches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from .elementwise import log
from .inputs import as_mask, as_real, broadcast, floor_of, is_finite_and
from .reductions import masked_mean


def softmax(x: Tensor, dim: int = -1, mask: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.softmax` over the elements where `mask` is True; the others get zero with gradient zero, also in a row without any True.

    An element of -Inf counts as masked. `mask` broadcasts to `x`. True means that an element is used, as in
    `scaled_dot_product_attention` and unlike `key_padding_mask`. Masked elements are ignored, even NaN.

    >>> safe.softmax(torch.zeros(2, 2), mask=torch.tensor([[True, True], [False, False]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    scores, kept = _masked_scores(x, dim, mask, dtype, "softmax")
    return torch.where(kept, torch.softmax(scores, dim), 0.0)


def log_softmax(x: Tensor, dim: int = -1, mask: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.log_softmax` over the elements where `mask` is True; the others get `safe.log` of a probability of zero.

    That value, log(tiny) of the dtype, is finite, so that `p * log_p` is zero instead of NaN. Masks work as in `safe.softmax`.

    >>> safe.log_softmax(torch.zeros(3), mask=torch.tensor([True, True, False]))
    tensor([ -0.6931,  -0.6931, -87.3365])
    """
    scores, kept = _masked_scores(x, dim, mask, dtype, "log_softmax")
    result = torch.log_softmax(scores, dim)
    return torch.where(kept, result, math.log(floor_of(result.dtype)))


def bce(
    input: Tensor,
    target: Tensor,
    *,
    from_logits: bool = True,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Binary cross-entropy of logits; `torch.nn.functional.binary_cross_entropy_with_logits`, but zero for an empty batch or mask.

    With `from_logits=False` the input is probabilities, for models that end in a sigmoid: `binary_cross_entropy`, but finite with
    gradient zero at 0 and 1 in every dtype. Logits are better: a saturated sigmoid has already lost the gradient.

    With `mask`, only elements where it is True count, and the mean is over them.

    >>> safe.bce(torch.tensor([1000.0, -1000.0]), torch.tensor([1.0, 1.0]))
    tensor(500.)
    """
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"safe.bce got reduction={reduction!r}. To fix: use 'mean', 'sum' or 'none'.")
    input = as_real(input, "bce")
    if target.shape != input.shape:
        raise UsageError(
            f"safe.bce got input of shape {tuple(input.shape)} and target of shape {tuple(target.shape)}, and broadcasting them "
            "would average over pairs that do not belong together. To fix: give both the same shape."
        )
    if pos_weight is not None and not from_logits:
        raise UsageError("safe.bce takes pos_weight for logits only. To fix: pass `weight`, or logits.")
    kept = torch.ones_like(input, dtype=torch.bool) if mask is None else as_mask(mask, "bce").expand(input.shape)
    input = torch.where(kept, input, 0.5)
    target = torch.where(kept, target, 0).to(input.dtype)
    if from_logits:
        if mask is None and input.numel():  # torch's mean has its own backward; keep it bit-identical
            return F.binary_cross_entropy_with_logits(input, target, weight, reduction=reduction, pos_weight=pos_weight)
        loss = F.binary_cross_entropy_with_logits(input, target, weight, reduction="none", pos_weight=pos_weight)
    else:
        loss = _bce_of_probabilities(input, target)
        loss = loss if weight is None else loss * weight
    if reduction == "mean":
        return masked_mean(loss, kept)
    loss = torch.where(kept, loss, 0.0)
    return loss.sum() if reduction == "sum" else loss


def _bce_of_probabilities(p: Tensor, target: Tensor) -> Tensor:
    p = torch.where(is_finite_and((p < 0) | (p > 1), p), p.detach().clamp(0, 1), p)
    at_one = is_finite_and(p >= 1, p)
    log_of_rest = torch.where(at_one, math.log(floor_of(p.dtype)), torch.log1p(-torch.where(at_one, 0.5, p)))
    return (target - 1) * log_of_rest - target * log(p)


def _masked_scores(
    x: Tensor, dim: int, mask: Tensor | None, dtype: torch.dtype | None, function: str
) -> tuple[Tensor, Tensor]:
    """Scores with -Inf where masked, or zeros in rows that are masked entirely; and the mask of the elements that are kept."""
    x = as_real(x, function)
    x = x if dtype is None else x.to(dtype)
    kept = x != -math.inf
    if mask is not None:
        kept = kept & as_mask(mask, function)
    x, kept = broadcast(x, kept)
    scores = torch.where(kept, x, -math.inf)
    return torch.where(kept.any(dim, keepdim=True), scores, 0.0), kept
