"""A proposal: a proven change of one source line, or a change of config or data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..core.causes import CAUSES
from ..core.incident import Incident


@dataclass
class Proposal:
    """A change of one line that was proven, or a change of config or data, for which there is no line."""

    kind: str
    """`source`, `config` or `data`."""
    what: str
    file: str = ""
    diff: str = ""
    loss: float | None = None
    """Of the bad step with the change."""
    on_healthy: str = ""
    """What the change does to a healthy step: `identical` or `close` loss and gradients; empty if none could be made to compare."""
    num_healthy: int = 0
    """How many healthy steps that was: the batch without what is wrong with it, and other batches of the data."""
    changed: str = field(default="", repr=False)
    """The source of the whole file with the change."""

    def apply(self) -> None:
        Path(self.file).write_text(self.changed, encoding="utf-8")


def of_settings(incident: Incident) -> list[Proposal]:
    """What else to change: with what a remedy on the replay has shown, if one has."""
    label = incident.cause.label
    worked = [remedy for remedy in incident.remedies if remedy.finite]
    found = []
    if label in ("fp16_overflow", "fp16_underflow"):
        module = incident.origin.module or ""
        island = f"guards.islands.modules=[{module}]" if module and not module.startswith("<") else "precision=bf16"
        found.append(Proposal("config", f"{island}, or precision=bf16: {CAUSES[label].advice}"))
    elif label in ("divergence", "optimizer_numerics"):
        what = "a smaller optimizer.lr, or guards.clip.max_norm=1.0"
        eps = next((r.detail for r in worked if r.name == "optimizer_eps"), "")
        found.append(Proposal("config", eps.removeprefix("with ") or what))
    if incident.samples and any(remedy.name == "drop_samples" for remedy in worked):
        found.append(
            Proposal("data", f"leave samples {incident.samples} of this batch out of the data, or repair them")
        )
    elif label == "bad_input_data":
        found.append(Proposal("data", CAUSES[label].advice))
    if not found:
        found.append(Proposal("config", incident.fix or CAUSES[label].advice))
    return [replace(each, loss=next((r.loss for r in worked), None)) for each in found]
