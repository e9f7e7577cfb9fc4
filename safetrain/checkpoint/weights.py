"""The final weights of a run as safetensors files."""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.files import replacing
from ..distributed.comm import by_first, process_rank
from ..optim.ema import Ema
from ..optim.modes import weights_to_use
from ..tensors.sharded import full_tensor, is_sharded
from .tensorfile import is_storable


def save_weights(directory: Path, model: nn.Module, optimizer: Optimizer, ema: Ema | None) -> None:
    """Write `final.safetensors`, and `final_ema.safetensors` when there is a moving average.

    They load without safetrain: `safetensors.torch.load_model(model, path)`. Every process must call it; rank 0 writes.
    """
    with weights_to_use(optimizer):
        _save(model, directory / "final.safetensors")
    if ema is not None:
        with ema.swapped_in():
            _save(model, directory / "final_ema.safetensors")


def _save(model: nn.Module, path: Path) -> None:
    parts = _whole_state(model) if is_sharded(model) else None
    by_first(lambda: _write(model, parts, path))


def _write(model: nn.Module, parts: dict[str, Tensor] | None, path: Path) -> None:
    try:
        with replacing(path) as temporary:
            state = model.state_dict() if parts is None else parts
            if parts is None and all(isinstance(value, Tensor) for value in state.values()):
                try:
                    save_model(model, str(temporary))
                except (RuntimeError, KeyError):  # parts of one storage, or types that safetensors cannot hold
                    _write_separately(state, temporary)
            else:  # sharded; or extra state that is no tensor, which safetensors cannot hold
                _write_separately({n: value for n, value in state.items() if isinstance(value, Tensor)}, temporary)
    except SafetensorError as error:
        raise OSError(f"{path.parent}: {error}") from error


def _write_separately(state: dict[str, Tensor], path: Path) -> None:
    """Every tensor by itself, as plain numbers. Those that the format cannot hold are left out, and that is said."""
    written = {name: value.detach().resolve_conj().resolve_neg() for name, value in state.items()}
    unable = [name for name, value in written.items() if not is_storable(value)]
    if unable:
        logging.getLogger("safetrain").warning(
            "the final weights lack %s: safetensors has no such type; the checkpoints have them", ", ".join(unable)
        )
    save_file({name: value.clone() for name, value in written.items() if name not in unable}, path)


def _whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded state_dict, gathered one tensor at a time to limit memory; empty on all ranks but 0."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            full = full_tensor(value)
            if process_rank() == 0:
                state[name] = full.cpu()
    return state
