"""Exports the weights of a run to a safetensors file, for use without safetrain."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from ..core.files import replacing
from ..core.rundir import CHECKPOINTS, existing_run_dir
from ..errors import CheckpointError
from .manifest import Damaged, checksum
from .store import CheckpointStore, Loaded


@dataclass(frozen=True)
class Exported:
    which: str
    checkpoint: str
    num_tensors: int
    num_bytes: int


def export_weights(run_dir: str | Path, out: Path, which: str | None = None) -> Exported:
    """Write one safetensors file with all keys of the model's state_dict, from a verified checkpoint.

    `which`: "best" (with `loop.ema` the average, which was evaluated), "last" or "ema" (the newest moving average); None: "best" if the run was evaluated, else "last".
    """
    store = CheckpointStore(existing_run_dir(run_dir) / CHECKPOINTS)
    if which is None:
        which = "best" if os.path.lexists(store.directory / "best") else "last"
    loaded = _best(store) if which == "best" else store.load_newest()
    if loaded is None:
        raise CheckpointError(f"{run_dir} has no checkpoint.\nTo fix: train with checkpoint.enabled=true.")
    averaged = loaded.state.part("ema")
    weights = averaged if which == "ema" else loaded.state.part("model")
    if which == "best" and averaged:  # the weights that were evaluated
        weights = averaged
    if not weights:
        raise CheckpointError(f"{run_dir} has no moving average.\nTo fix: train with loop.ema, or export best or last.")
    transient = loaded.state.part("transient")
    weights = {name: tensor for name, tensor in weights.items() if name not in transient}
    for name, first in loaded.state.rest["tied"].items():
        weights[name] = weights[first].clone()
    with replacing(out) as path:
        save_file(weights, path, metadata={"format": "pt", "checkpoint": loaded.path.name, "which": which})
        before = checksum(path)
    if checksum(out) != before or load_file(out).keys() != weights.keys():
        raise CheckpointError(f"{out} does not read back as written.\nTo fix: check the disk, and export again.")
    return Exported(which, loaded.path.name, len(weights), out.stat().st_size)


def _best(store: CheckpointStore) -> Loaded:
    try:
        return store.load(store.directory / os.readlink(store.directory / "best"))
    except OSError as error:
        raise CheckpointError(
            f"{store.directory.parent} has no best checkpoint: nothing was evaluated, or checkpoint.keep_best is 0.\n"
            "To fix: export --which last."
        ) from error
    except Damaged as problem:
        raise CheckpointError(
            f"the best checkpoint of {store.directory.parent} cannot be used: {problem}.\nTo fix: export --which last."
        ) from problem
