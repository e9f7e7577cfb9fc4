"""Which checkpoints are kept when a new one is safely on disk."""

from __future__ import annotations

from pathlib import Path

from ..config.schema import CheckpointConfig
from .manifest import Manifest
from .store import CheckpointStore


def chosen(
    store: CheckpointStore, config: CheckpointConfig, mode: str, sound: list[tuple[Path, Manifest]]
) -> set[Path]:
    """Those that stay of the sound ones, oldest first. Points `best` at the best. Called in a thread of its own."""
    sign = 1.0 if mode == "min" else -1.0
    # Of several checkpoints of one step the last counts: it also knows of the evaluation, or of the end of the epoch.
    sound = list({manifest.step: (path, manifest) for path, manifest in sound}.values())
    ranked = sorted((sign * m.metric, index) for index, (_, m) in enumerate(sound) if m.metric is not None)
    if ranked:
        store.point("best", sound[ranked[0][1]][0])
    kept = {path for path, _ in sound[-config.keep_last :]}
    kept |= {sound[index][0] for _, index in ranked[: config.keep_best]}
    if config.keep_every is not None:
        seen: set[int] = set()
        for path, manifest in sound:
            if (mark := manifest.num_committed // config.keep_every) > 0 and mark not in seen:
                kept.add(path)
                seen.add(mark)
    return kept
