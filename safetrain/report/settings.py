"""The config of a run as flat `key: value` pairs, and the differences between two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.tree import Place, Problems, YamlError, from_yaml, plain
from ..core.rundir import CONFIG
from .run import RunHistory

MAX_DIFFERENCES = 200


@dataclass(frozen=True)
class Difference:
    key: str
    first: str
    second: str


def flat_config(run: RunHistory) -> dict[str, str]:
    """Empty if there is no config, or it cannot be read."""
    place = Place(CONFIG, CONFIG, run.directory)
    try:
        node = from_yaml(run.config, lambda line: place, Problems())
    except YamlError:
        return {}
    tree = None if node is None else plain(node)
    found: dict[str, str] = {}
    _flatten(tree, "", found)
    return found


def _flatten(node: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            _flatten(value, f"{path}.{key}" if path else str(key), found)
    elif path:
        found[path] = "null" if node is None else str(node).lower() if isinstance(node, bool) else str(node)


def differences(first: RunHistory, second: RunHistory) -> list[Difference]:
    """The settings that differ; a key that only one run has is shown as a dash for the other."""
    one, other = flat_config(first), flat_config(second)
    _fold_sections(one, other)
    _fold_sections(other, one)
    keys = [*one, *(key for key in other if key not in one)]
    found = [Difference(key, one.get(key, "—"), other.get(key, "—")) for key in keys]
    return [difference for difference in found if difference.first != difference.second][:MAX_DIFFERENCES]


def _fold_sections(one: dict[str, str], other: dict[str, str]) -> None:
    """A section that is a single value in `other` (`guards.clip: null`) becomes one in `one` too, so that both can be compared."""
    for key in [key for key in other if key not in one]:
        inside = {name: one.pop(name) for name in [name for name in one if name.startswith(f"{key}.")]}
        if inside:
            one[key] = ", ".join(f"{name[len(key) + 1 :]}: {value}" for name, value in inside.items())
