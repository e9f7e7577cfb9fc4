"""Weights on disk."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from ..ema import Ema
from ..files import replacing


def save_weights(directory: Path, model: nn.Module, ema: Ema | None) -> None:
    """`final.safetensors`, and `final_ema.safetensors` when there is a moving average.

    Loads without safetrain: `safetensors.torch.load_model(model, path)`.
    """
    try:
        with replacing(directory / "final.safetensors") as path:
            _save(model, path)
        if ema is not None:
            with replacing(directory / "final_ema.safetensors") as path, ema.swapped_in():
                _save(model, path)
    except SafetensorError as error:
        raise OSError(f"{directory}: {error}") from error


def _save(model: nn.Module, path: Path) -> None:
    state = model.state_dict()
    if all(isinstance(value, Tensor) for value in state.values()):
        save_model(model, str(path))
    else:  # modules with a state of another kind, which safetensors has no place for
        save_file({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}, path)
