"""How layers of a config are laid over each other, and how overrides change the result."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.spelling import suggest
from ..guards import DEFAULT, REGISTRY
from .schema import Config
from .tree import MAX_DEPTH, TARGET, KeyPath, Node, Place, Problems, YamlError, dotted, from_python, from_yaml

SECTIONS = {(f.name,) for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default_factory)}
GUARDS = ("guards",)


def merge(base: Node | None, over: Node, path: KeyPath = ()) -> Node:
    """`over` laid over `base`: mappings key by key, everything else whole.

    Arguments belong to their target: where `over` names another `_target_`, nothing of `base` remains.
    """
    if path in SECTIONS and over.value is None and base is not None:
        return base  # an empty section says nothing
    if path == GUARDS and over.value is None:
        names = [*DEFAULT, *(base.value if base is not None and isinstance(base.value, dict) else ())]
        over = dataclasses.replace(over, value={name: Node(None, over.place) for name in names})
    if base is None or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    if over.target is not None and over.target != base.target:
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged.get(key), child, (*path, key))
    if path == GUARDS:
        merged = {name: node for name, node in merged.items() if not _outside_guard_turned_off(name, node, base)}
    return Node(merged, over.place)


def _outside_guard_turned_off(name: Any, node: Node, base: Node) -> bool:
    before = base.get(name)
    return node.value is None and name not in REGISTRY and before is not None and before.target is not None


@dataclass(frozen=True)
class Override:
    """One change on top of a config: `key=value`, or `~key` to delete."""

    key: str
    value: Any = None
    delete: bool = False
    text: str = ""
    """As the user typed it."""
    origin: str = "override"
    """Shown as the origin of the value: `override`, or the flag that stands for it."""

    @classmethod
    def parse(cls, text: str) -> Override:
        """`key=value` with the value still in YAML, or `~key`. Raises ValueError for anything else."""
        if text.startswith("~"):
            key = text[1:]
            if "=" in key:
                raise ValueError("a deletion takes no value; write ~key or key=value")
            override = cls(key, delete=True, text=text)
        else:
            key, equals, value = text.partition("=")
            if not equals:
                raise ValueError("expected key=value, or ~key to delete")
            override = cls(key, _Yaml(value), text=text)
        if not override.path:
            raise ValueError("the key is missing; expected key=value, or ~key to delete")
        if len(override.path) > MAX_DEPTH:
            raise ValueError(f"its key is more than {MAX_DEPTH} levels deep; a config is not")
        return override

    @property
    def path(self) -> list[str]:
        return [part for part in re.split(r"\.|\[(\d+)\]", self.key.strip()) if part]

    @property
    def place(self) -> Place:
        if self.origin == "override":
            text = self.text or f"{'~' if self.delete else ''}{self.key}{'' if self.delete else f'={self.value}'}"
            return Place(f"override {text!r}", "override", Path.cwd())
        return Place(self.text or self.origin, self.origin, Path.cwd())


class _Yaml(str):
    """The value of an override that still has to be read as YAML."""


def apply_overrides(tree: Node, defaults: Node, overrides: list[Override], problems: Problems) -> Node:
    """The tree with all overrides applied, later ones over earlier ones.

    Changes of a `_target_` come first, because they drop the arguments of the old target and not those of the new.
    """
    for override in sorted(overrides, key=lambda o: o.delete or o.path[-1] != TARGET):
        try:
            if override.delete:
                tree = _delete(tree, defaults, override.path, override.place)
            else:
                tree = merge(tree, _layer(tree, override.path, _value(override, problems), ()))
        except LookupError as error:
            problems.add(override.place, (), str(error.args[0]))
    return tree


def _value(override: Override, problems: Problems) -> Node:
    place = override.place
    if not isinstance(override.value, _Yaml):
        return from_python(override.value, place, problems, tuple(override.path))
    try:
        node = from_yaml(str(override.value), lambda line: place, problems)
    except YamlError as error:
        raise LookupError(f"the value is not valid YAML: {error}") from None
    return Node(None, place) if node is None or (node.text == "" and node.value is None) else node


def _layer(base: Node | None, parts: list[str], new: Node, path: KeyPath) -> Node:
    """`new` wrapped into what has to be laid over `base` so that it ends up at `parts`."""
    if not parts:
        return new
    head, rest = parts[0], parts[1:]
    value = None if base is None else base.value
    if isinstance(value, list):
        index = _index(value, head, path)
        changed = list(value)
        changed[index] = merge(value[index], _layer(value[index], rest, new, (*path, index)), (*path, index))
        return Node(changed, new.place)
    if isinstance(value, dict):
        key = _key(value, head)
        return Node({key: _layer(value.get(key), rest, new, (*path, key))}, new.place)
    if value is not None:
        raise LookupError(f"{dotted(path)} is the value {value!r} and has no key {head!r}")
    return Node({head: _layer(None, rest, new, (*path, head))}, new.place)


def _delete(tree: Node, defaults: Node, parts: list[str], place: Place, path: KeyPath = ()) -> Node:
    head, rest = parts[0], parts[1:]
    if isinstance(tree.value, list):
        index = _index(tree.value, head, path)
        changed = list(tree.value)
        if rest:
            changed[index] = _delete(tree.value[index], defaults, rest, place, (*path, index))
        else:
            del changed[index]
        return Node(changed, place)
    if not isinstance(tree.value, dict):
        raise LookupError(f"{dotted((*path, head))} is not there, nothing to delete; {dotted(path)} is {tree.value!r}")
    key = _key(tree.value, head)
    if key not in tree.value:
        raise LookupError(f"{dotted((*path, head))} is not there, nothing to delete{suggest(head, tree.value)}")
    here = (*path, key)
    if rest:
        return tree.having(key, _delete(tree.value[key], defaults, rest, place, here))
    if path == GUARDS:
        return merge(tree, Node({key: Node(None, place)}, place), path)
    kept = {k: v for k, v in tree.value.items() if k != key}
    if len(here) == 1 or path in SECTIONS or (len(path) == 2 and path[:1] == GUARDS):
        default = _find(defaults, here)
        if default is not None:  # a field of the schema always has a value
            kept[key] = default
    return dataclasses.replace(tree, value=kept)


def _find(tree: Node, path: KeyPath) -> Node | None:
    node: Node | None = tree
    for key in path:
        node = None if node is None else node.get(key)
    return node


def _key(mapping: dict[Any, Node], text: str) -> Any:
    """The key that reads like `text`: keys of a mapping may be numbers."""
    return next((key for key in mapping if str(key) == text), text)


def _index(items: list[Node], text: str, path: KeyPath) -> int:
    if not text.isdigit() or int(text) >= len(items):
        raise LookupError(f"{text!r} is not an index of {dotted(path)}, a list of {len(items)}")
    return int(text)
