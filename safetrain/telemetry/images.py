"""Images as sinks receive them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError


def pixels_of(image: Any) -> tuple[Tensor, bool]:
    """The image as bytes `[channels, height, width]` on the host, and whether all its values were finite: others become 0.

    `image`: a tensor or array `[height, width]` or `[channels, height, width]`, floats from 0 to 1 or uint8.
    """
    tensor = image if isinstance(image, Tensor) else torch.as_tensor(image)
    if tensor.dim() == 2:
        tensor = tensor[None]
    if tensor.dim() != 3 or tensor.shape[0] not in (1, 3, 4) or 0 in tensor.shape:
        raise UsageError(
            f"log_image takes one image [channels, height, width] with 1, 3 or 4 channels, or [height, width]; got {list(tensor.shape)}.\n"
            "To fix: take one image of a batch (images[0]), or make one of all of them (torchvision.utils.make_grid(images)); "
            "channels that come last are put first by image.permute(2, 0, 1)."
        )
    if not tensor.is_floating_point():
        if tensor.dtype not in (torch.uint8, torch.bool):
            raise UsageError(
                f"log_image takes floats from 0 to 1 or uint8, not {tensor.dtype}.\n"
                "To fix: image.to(torch.uint8) if its values go from 0 to 255, or scale it to floats from 0 to 1."
            )
        tensor = tensor.detach().cpu()
        return (tensor * 255 if tensor.dtype == torch.bool else tensor).to(torch.uint8), True
    tensor = tensor.detach().float().cpu()
    is_finite = bool(torch.isfinite(tensor).all())
    return (tensor.nan_to_num(0.0, 0.0, 0.0).clamp(0, 1) * 255).round().to(torch.uint8), is_finite
