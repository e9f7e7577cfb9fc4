"""Weights on disk."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from ..ema import Ema
from ..files import replacing


def save_weights(directory: Path, model: nn.Module, ema: Ema | None) -> None:
    """`final.safetensors`, and `final_ema.safetensors` when there is a moving average.

    Loads without safetrain: `safetensors.torch.load_model(model, path)`.
    """
    with replacing(directory / "final.safetensors") as path:
        save_model(model, str(path))
    if ema is not None:
        with replacing(directory / "final_ema.safetensors") as path, ema.swapped_in():
            save_model(model, str(path))
