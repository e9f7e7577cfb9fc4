"""What the run adds to the end of a lineage: since when a parameter has been this large, and the indices of the samples
in the data set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..checkpoint.snapshots import Snapshot
from ..core.incident import Incident
from ..core.numbers import counted
from ..tensors.sharded import local

FEW = 8
"""More samples than these are not listed."""
GREW = 2.0
"""Growth by less is what training does."""


def note_growth(incident: Incident, snapshots: Sequence[Snapshot], model: nn.Module, step: int) -> None:
    """Said at the end of the lineage, if that is a parameter or a buffer, and at the cause."""
    end = incident.lineage[-1] if incident.lineage else None
    if end is None or end.kind not in ("parameter", "buffer"):
        return
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}.get(end.name)
    earlier = [s for s in snapshots if s.step < step and f"model/{end.name}" in s.peaks]
    if tensor is None or not earlier or not tensor.is_floating_point() or not tensor.numel():
        return
    oldest, newest = earlier[0], earlier[-1]
    now = float(local(tensor.detach()).abs().max())
    then = _peak(oldest, end.name)
    if now != now or now == torch.inf:
        text = f", which was finite at step {newest.step}"
    elif then > 0 and now / then >= GREW:
        text = f", which has grown {now / then:.3g}-fold in {counted(step - oldest.step, 'step')} (at most {then:.3g} before, {now:.3g} now)"
    else:
        text = f", which was no different at step {oldest.step}"
    end.text += text


def note_indices(incident: Incident, indices: Sequence[int] | None) -> None:
    """Of the samples that the value came from, if they are few. `indices`: of each element of the batch, in the data set."""
    end = incident.lineage[-1] if incident.lineage else None
    if end is None or indices is None or end.kind != "data" or not end.rows or max(end.rows) >= len(indices):
        return
    if len(end.rows) < len(indices) and len(end.rows) <= FEW:
        named = ", ".join(str(indices[row]) for row in end.rows)
        end.text += f" (sample{'s' if len(end.rows) > 1 else ''} {named} of the data set)"


def _peak(snapshot: Snapshot, name: str) -> float:
    return max(map(abs, snapshot.peaks[f"model/{name}"]))
