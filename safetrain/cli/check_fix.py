"""The fixes that `safetrain check` proposes for values of the config, written as a config of their own."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.files import write_text
from ..errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ..preflight import CheckReport

_CHANGE = re.compile(r"(?<![\w.=])([a-z_]+(?:\.\w+)+)=(\[[^\]]*\]|[^\s,;()…]+)")


def proposed(report: CheckReport, config: str, overrides: tuple[str, ...]) -> list[str]:
    """`key=value`, from the fixes of what failed or is worth a look: those that the config accepts, one for each key."""
    from .flags import load

    found: dict[str, str] = {}
    for checked in (*report.with_status("FAIL"), *report.with_status("WARN")):
        for key, value in _CHANGE.findall(checked.fix):
            change = f"{key}={value.rstrip('.')}"
            try:
                load(config, (*overrides, *found.values(), change))
            except (ConfigError, UsageError):
                continue
            found.setdefault(key, change)
    return list(found.values())


def write_fixed(config: str, changes: Iterable[str]) -> Path:
    """A config that extends the checked one; it never takes the place of another file."""
    is_file = os.path.exists(config)
    original = Path(config)
    target = original.with_name(f"{original.stem}.fixed.yaml") if is_file else Path(f"{config}.fixed.yaml")
    if target.exists():
        raise UsageError(f"{target} is there already.\nTo fix: move it away, then check again.")
    lines = [f"# {config} with what safetrain check proposes.", f"extends: [{original.name if is_file else config}]"]
    write_text(target, "\n".join([*lines, *_tree(changes)]) + "\n")
    return target


def _tree(changes: Iterable[str]) -> list[str]:
    """Nested YAML of `a.b=value`."""
    lines: list[str] = []
    above: list[str] = []
    for key, _, value in sorted(change.partition("=") for change in changes):
        parts = key.split(".")
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(above, parts[:-1], strict=False))
        )
        lines += [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts[:-1]) if depth >= shared]
        lines.append(f"{'  ' * (len(parts) - 1)}{parts[-1]}: {value}")
        above = parts[:-1]
    return lines
