"""What may change between a run and its resume: config keys, and what to say of a state that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..config.private import digest, private_keys
from ..config.render import to_dict
from ..config.schema import Config
from ..errors import CheckpointError, ConfigError, SafetrainError

FREE = (
    *("name", "data.eval*", "data.num_workers", "guards*", "recovery*", "forensics*", "checkpoint*", "logging*"),
    *(
        "loop.max_steps",
        "loop.max_epochs",
        "loop.max_hours",
        "loop.end_on_signals",
        "loop.eval_every",
        "loop.monitor*",
        "loop.log_every",
    ),
    *("loop.device", "loop.host_read_every", "loop.strategy", "loop.shard_blocks", "data.sharded"),
)
"""Keys that may change: the length of the training, and what is watched, saved and logged. They affect neither the model,
nor the order of the data, nor what a step computes, nor the contents of the saved state."""

SAVED = ("optimizer.", "scheduler.")
"""Keys whose values are part of the saved state: a forced resume uses the saved values."""


def values_by_key(config: Config) -> dict[str, Any]:
    """By dotted keys."""
    return dict(_leaves(to_dict(config)))


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Every value that differs, by its dotted key: (before, after)."""
    old, new = values_by_key(before), values_by_key(after)
    missing = object()
    return {
        key: (old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key, missing) != new.get(key, missing)
    }


def check_changes(before: Config, after: Config, force: bool, recorded: Mapping[str, str] | None = None) -> list[str]:
    """One line for each change. Raises ConfigError if one of them changes the training itself, unless `force`.

    `recorded`: digests of values from the environment, as they were when the run started.
    """
    found = changes(before, after)
    private = {*private_keys(before), *private_keys(after)}
    lines = {
        key: f"{key}: from the environment, with another value" if key in private else f"{key}: {old!r} -> {new!r}"
        for key, (old, new) in found.items()
    }
    values = values_by_key(after)
    for key, digits in (recorded or {}).items():
        if key not in lines and digest(key, values.get(key)) != digits:
            lines[key] = f"{key}: from the environment, with another value than when the run started"
    refused = [line for key, line in lines.items() if not any(fnmatch(key, pattern) for pattern in FREE)]
    if refused and not force:
        raise ConfigError(
            [
                f"{line}: this changes the training itself. To fix: keep the value of the run, or force it (safetrain resume --force, fit(resume='force'))"
                for line in refused
            ]
        )
    kept = " (not applied: the saved state has its own value)"
    messages = [f"{line}{kept if key.startswith(SAVED) else ''}" for key, line in lines.items()]
    planned, now = found.get("loop.max_steps", (None, None))
    return [*messages, *_schedule_too_short(after, planned, now)]


def _schedule_too_short(config: Config, planned: int | None, now: int | None) -> Iterator[str]:
    """Settings of the schedule that were the length of the run, which is longer now."""
    if planned is None or now is None or now <= planned:
        return
    for key, value in _leaves(to_dict(config).get("scheduler") or {}):
        if value == planned:
            yield f"scheduler.{key} is still {value}: the schedule ends there, check the learning rate of the steps after it"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


@contextmanager
def as_saved(path: Path) -> Iterator[None]:
    """A state that was written by another program, or for other parts, is said to be one."""
    try:
        yield
    except SafetrainError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in {path} does not fit this run: {type(error).__name__}: {error}.\n"
            "To fix: build the same model, optimizer, data and guards as the run that saved it; or resume from an older checkpoint, by "
            "moving this one away."
        ) from error
