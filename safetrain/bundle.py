"""An incident on disk: what it says, and everything a replay of its step needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import map_tensors
from .files import replacing, to_json, write_text
from .incident import Incident
from .rng import RandomState

INCIDENT, REPLAY = "incident.json", "replay.pt"


def write_report(directory: Path, incident: Incident) -> None:
    write_text(directory / INCIDENT, to_json(incident.to_dict(), indent=2) + "\n")


def write_replay(
    directory: Path,
    window: Sequence[Any],
    random_state: RandomState,
    model: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    max_mb: float,
) -> None:
    """The micro-batches, the random state and the weights that the step began with, loadable with `weights_only=True`.

    Weights are left out when they are larger than `max_mb`, and a batch of objects that cannot be pickled is.
    """
    batches = [map_tensors(batch, _on_cpu) for batch in window]
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
    weights = {name: tensor.detach().cpu() for name, tensor in model.items()} if size <= max_mb * 2**20 else None
    contents = {"random_state": random_state.to_plain(), "window": batches, "model": weights, **facts}
    with replacing(directory / REPLAY) as path:
        try:
            torch.save(contents, path)
        except OSError:
            raise
        except Exception:  # whatever the objects in the batch raise when they are pickled
            torch.save({**contents, "window": None}, path)


def _on_cpu(item: Any) -> Any:
    return item.cpu() if hasattr(item, "cpu") else item
