"""Tries changes of the source on a replay of the bad step, and ranks those that keep it finite and change nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import safe
from ..core import progress
from ..core.incident import Incident
from ..forensics.ownership import is_own
from ..forensics.replay import Replayer
from ..forensics.source import CLOSE, IDENTICAL, Bench, candidates
from ..forensics.step import Step
from .proposal import Proposal, of_settings

MAX_LINES = 4
ENOUGH = 3
"""Proven changes after which no more are looked for."""


def propose(step: Step, incident: Incident, max_seconds: float = 60.0, others: Sequence[Any] = ()) -> list[Proposal]:
    """Changes that keep the step finite, the best first; where the source is not what is wrong, of config or data.

    `others` are further batches of the data: on those that are finite, a change must leave loss and gradients as they are.
    """
    found: list[Proposal] = []
    deadline = time.monotonic() + max_seconds
    if incident.cause.label not in _NOT_IN_SOURCE:
        with torch.inference_mode(False), torch.enable_grad(), Replayer(step) as replayer:
            found = _of_source(replayer, incident, deadline, others)
    return found or of_settings(incident)


_NOT_IN_SOURCE = {"divergence", "corrupt_parameter", "bad_input_data"}


def _of_source(replayer: Replayer, incident: Incident, deadline: float, others: Sequence[Any]) -> list[Proposal]:
    bench = Bench(
        replayer,
        incident.samples,
        is_update=incident.origin.phase == "optimizer",
        watches_buffers=incident.trigger.signal == "buffers",
        others=others,
        names={"safe": safe},
    )
    found: list[Proposal] = []
    if bench.is_good(replayer.plain()):
        return []  # what is wrong does not show on a replay, so nothing can be proven
    for file, line, operation in _places(incident):
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for number, candidate in enumerate(candidates(source, line, operation, incident.cause.label)):
            progress.note("changes of the source tried", number)
            if time.monotonic() > deadline or len(found) >= ENOUGH:
                break
            change = bench.tried(file, source, candidate)
            if change is None:
                continue
            proven = change.loss, change.on_healthy, change.num_healthy
            found.append(Proposal("source", change.what, file, change.diff, *proven, changed=change.source))
            if change.on_healthy == IDENTICAL:
                break
    return sorted(found, key=lambda proposal: (proposal.on_healthy != IDENTICAL, proposal.on_healthy != CLOSE))


def _places(incident: Incident) -> Iterator[tuple[str, int, str]]:
    """Lines of the user's own that may be changed: of the operation, of the call into the library, and where the value was made."""
    origin = incident.origin
    seen: set[tuple[str, int]] = set()
    lines = [(origin.file, origin.line, origin.name or "")]
    if origin.called_from is not None:
        lines.append((origin.called_from.file, origin.called_from.line, ""))
    lines += [(link.file, link.line, link.name.rpartition(" of ")[2]) for link in incident.lineage]
    for file, line, operation in lines:
        if (
            file is not None
            and line is not None
            and is_own(file)
            and (file, line) not in seen
            and len(seen) < MAX_LINES
        ):
            seen.add((file, line))
            yield file, line, operation
