"""May a run go on with another config than it began with?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from ..config.render import to_dict
from ..config.schema import Config
from ..errors import ConfigError

FREE = (
    *("name", "data.eval*", "data.num_workers", "guards*", "recovery*", "forensics*", "checkpoint*", "logging*"),
    *("loop.max_steps", "loop.max_epochs", "loop.max_hours", "loop.eval_every", "loop.monitor*", "loop.log_every"),
    *("loop.device", "loop.host_read_every", "loop.strategy", "loop.shard_blocks", "data.sharded"),
)
"""Keys that may change: how long to train, and what is watched, saved and shown. The model, the order of the data, what a
step computes and what the saved state is made of do not depend on them."""

SAVED = ("optimizer.", "scheduler.")
"""Keys whose values are part of the saved state, which is what a forced resume goes on with."""


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Every value that differs, by its dotted key: before and after."""
    old, new = dict(_leaves(to_dict(before))), dict(_leaves(to_dict(after)))
    missing = object()
    return {
        key: (old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing)
    }


def check_changes(before: Config, after: Config, force: bool) -> list[str]:
    """One line for each change. Raises ConfigError if one would not go on with the same training, unless `force`."""
    found = changes(before, after)
    lines = {key: f"{key}: {old!r} -> {new!r}" for key, (old, new) in found.items()}
    refused = [line for key, line in lines.items() if not any(fnmatch(key, pattern) for pattern in FREE)]
    if refused and not force:
        raise ConfigError(
            [
                f"{line}: this changes the training itself. To fix: keep the value of the run, or force it (safetrain resume --force, fit(resume='force'))"
                for line in refused
            ]
        )
    kept = " (not applied: the state that was saved goes on with its own)"
    told = [f"{line}{kept if key.startswith(SAVED) else ''}" for key, line in lines.items()]
    planned, now = found.get("loop.max_steps", (None, None))
    return [*told, *_outlived(after, planned, now)]


def _outlived(config: Config, planned: int | None, now: int | None) -> Iterator[str]:
    """Settings of the schedule that were the length of the run, and are not any more."""
    if planned is None or now is None or now <= planned:
        return
    for key, value in _leaves(to_dict(config).get("scheduler") or {}):
        if value == planned:
            yield f"scheduler.{key} is still {value}: the schedule was made for so many steps, look at the learning rate beyond"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
