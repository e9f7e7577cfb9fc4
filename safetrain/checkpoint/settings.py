"""Optimizer settings that a resume takes from the checkpoint, although the new optimizer was made with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

WATCHED = ("lr", "weight_decay")


@contextmanager
def noting_settings(optimizer: Optimizer, note: Callable[[str], None]) -> Iterator[None]:
    """Around the loading of its state: note what it was made with otherwise."""
    made_with = _settings(optimizer)
    yield
    for text in _differences(made_with, _settings(optimizer)):
        note(text)


def _settings(optimizer: Optimizer) -> list[dict[str, float]]:
    """Of each parameter group; the learning rate that a schedule started from, where there is one."""
    found = []
    for group in optimizer.param_groups:
        values = {name: group[name] for name in WATCHED if name in group}
        if "initial_lr" in group:
            values["lr"] = group["initial_lr"]
        found.append({name: float(value) for name, value in values.items()})
    return found


def _differences(made_with: Sequence[dict[str, float]], saved: Sequence[dict[str, float]]) -> Iterator[str]:
    for index, (mine, theirs) in enumerate(zip(made_with, saved, strict=False)):
        of = f" of parameter group {index}" if len(saved) > 1 else ""
        for name in mine.keys() & theirs.keys():
            if abs(mine[name] - theirs[name]) > 1e-6 * max(abs(mine[name]), abs(theirs[name])):
                yield (
                    f"the optimizer was made with {name}={mine[name]:g}{of}, and the run goes on with {name}={theirs[name]:g}, as it was saved; "
                    f"to change it, set optimizer.param_groups[{index}][{name!r}] in on_commit, or start a new run"
                )
