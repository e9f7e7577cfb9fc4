"""A config before it is typed: values with the file and line where they were written."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..core.options import config_key
from ..core.scalars import Loader, scalar_value

TARGET = "_target_"
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 2**19, 20_000, 64
"""What a config file may amount to, with its aliases written out. Larger ones are not configs, or made to exhaust the reader."""
BROKEN = object()
"""Stands for a value whose problem was already reported, so that it is not reported twice."""
KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class Place:
    """Where a value was written."""

    label: str
    """For a problem: `dir/base.yaml:12`, `override 'seed=1'`."""
    origin: str
    """For a listing: `base.yaml:12`, `override`, `--seed`, `default`."""
    directory: Path
    """What file targets are relative to."""


@dataclass(frozen=True)
class Node:
    """A mapping of nodes, a list of nodes, or a scalar."""

    value: Any
    place: Place
    text: str | None = None
    """A scalar as it was written; with a value of None, empty text means that nothing follows the colon."""

    def get(self, key: Any) -> Node | None:
        return self.value.get(key) if isinstance(self.value, dict) else None

    def having(self, key: Any, child: Node) -> Node:
        """The mapping with this node under the key."""
        return dataclasses.replace(self, value={**self.value, key: child})

    @property
    def target(self) -> Any:
        """The value of `_target_`, None without one."""
        node = self.get(TARGET)
        return None if node is None else node.value


class Problems(list[str]):
    """Everything wrong with a config, in the order found."""

    def add(self, place: Place, path: KeyPath, message: str) -> None:
        parts = [place.label, dotted(path), message]
        problem = ": ".join(part for part in parts if part)
        if problem not in self:
            self.append(problem)


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def plain(node: Node) -> Any:
    """The node as dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return None if node.value is BROKEN else node.value


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every scalar, list and empty mapping with its path."""
    if isinstance(node.value, dict) and (node.value or not path):
        for key, child in node.value.items():
            yield from leaves(child, (*path, key))
    else:
        yield path, node


def rewrite(node: Node, change: Callable[[Node, KeyPath], Node], path: KeyPath = ()) -> Node:
    """The tree with every node replaced by `change(node, path)`, children first."""
    if isinstance(node.value, dict):
        value: Any = {key: rewrite(child, change, (*path, key)) for key, child in node.value.items()}
        node = dataclasses.replace(node, value=value)
    elif isinstance(node.value, list):
        value = [rewrite(child, change, (*path, index)) for index, child in enumerate(node.value)]
        node = dataclasses.replace(node, value=value)
    return change(node, path)


# --- from Python -------------------------------------------------------------------------------------------------


def from_python(data: Any, place: Place, problems: Problems, path: KeyPath = (), literal: bool = False) -> Node:
    """A tree from dicts, lists, scalars and dataclass instances.

    With `literal`, strings mean themselves: `${…}` in them is text, not an interpolation.
    """

    def below(value: Any, key: Any) -> Node:
        return from_python(value, place, problems, (*path, key), literal)

    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return Node(
            {(key := config_key(f.name)): below(getattr(data, f.name), key) for f in dataclasses.fields(data)}, place
        )
    if isinstance(data, Mapping):
        return Node({key: below(value, key) for key, value in data.items()}, place)
    if isinstance(data, str):
        return Node(escape(str(data)) if literal else str(data), place)
    if isinstance(data, os.PathLike):
        return Node(os.fspath(data), place)
    if isinstance(data, Sequence) and not isinstance(data, bytes):
        return Node([below(value, index) for index, value in enumerate(data)], place)
    if data is None or isinstance(data, bool):
        return Node(data, place)
    if isinstance(data, numbers.Integral):
        return Node(int(data), place)
    if isinstance(data, numbers.Real):
        return Node(float(data), place)
    message = (
        f"a {type(data).__name__} cannot be part of a config; give strings, numbers, lists and mappings only, "
        f"or hand the object to SafeTrainer itself"
    )
    problems.add(place, path, message)
    return Node(BROKEN, place)


def escape(text: str) -> str:
    """Text that interpolation turns back into `text`."""
    head, *rest = text.split("${")
    for part in rest:
        num_backslashes = len(head) - len(head.rstrip("\\"))
        head += "\\" * (num_backslashes + 1) + "${" + part
    return head


# --- from YAML ---------------------------------------------------------------------------------------------------


class YamlError(Exception):
    """Text that is not YAML; `line` and `column` count from 1, and are None when unknown."""

    def __init__(self, message: str, line: int | None, column: int | None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def from_yaml(text: str, place_of_line: Callable[[int], Place], problems: Problems) -> Node | None:
    """The tree of a YAML document with the place of every key; None for an empty document."""
    if len(text) > MAX_BYTES:
        raise YamlError(
            f"{len(text) >> 10} KB are too much for a config ({MAX_BYTES >> 10} KB); keep data in files of its own",
            None,
            None,
        )
    try:
        document = yaml.compose(text, Loader=Loader)
    except RecursionError:
        raise _too_deep(None) from None
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, text) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error).replace("\n", " "), None, None) from None
    if document is None:
        return None
    return _Builder(place_of_line, problems).node(document, place_of_line(document.start_mark.line + 1), ())


def _too_deep(line: int | None) -> YamlError:
    return YamlError(f"nested more than {MAX_DEPTH} levels deep; a config is not", line, None if line is None else 1)


def _yaml_error(error: yaml.MarkedYAMLError, text: str) -> YamlError:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "not valid YAML"
    if mark is None:
        return YamlError(what, None, None)
    lines = text.splitlines()
    written = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in written[: mark.column + 1]:
        what = "indented with a tab, which YAML does not allow; use spaces"
    return YamlError(f"{what}: {written.strip()!r}", mark.line + 1, mark.column + 1)


class _Builder:
    """Turns the nodes of PyYAML into ours."""

    def __init__(self, place_of_line: Callable[[int], Place], problems: Problems) -> None:
        self.place_of_line = place_of_line
        self.problems = problems
        self.open: list[yaml.Node] = []
        self.num_values = 0

    def node(self, source: yaml.Node, place: Place, path: KeyPath) -> Node:
        if any(source is parent for parent in self.open):
            self.problems.add(place, path, "the alias refers to the node that contains it; write the values out")
            return Node(BROKEN, place)
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            message = (
                f"with its aliases written out it has more than {MAX_VALUES} values; keep data in files of its own"
            )
            raise YamlError(message, source.start_mark.line + 1, 1)
        if len(self.open) > MAX_DEPTH:
            raise _too_deep(source.start_mark.line + 1)
        self.open.append(source)
        try:
            if isinstance(source, yaml.MappingNode):
                return Node(self.mapping(source, path), place)
            if isinstance(source, yaml.SequenceNode):
                items = enumerate(source.value)
                return Node([self.node(item, self.place(item), (*path, index)) for index, item in items], place)
            assert isinstance(source, yaml.ScalarNode)
            if not source.tag.startswith("tag:yaml.org,2002:"):
                self.problems.add(self.place(source), path, f"unknown YAML tag {source.tag}; write a plain value")
            try:
                return Node(scalar_value(source), place, source.value)
            except (ValueError, KeyError):
                kind = source.tag.rpartition(":")[2]
                self.problems.add(self.place(source), path, f"{source.value!r} cannot be read as !!{kind}")
                return Node(BROKEN, place)
        finally:
            self.open.pop()

    def place(self, source: yaml.Node) -> Place:
        return self.place_of_line(source.start_mark.line + 1)

    def mapping(self, source: yaml.MappingNode, path: KeyPath) -> dict[Any, Node]:
        own: dict[Any, Node] = {}
        inherited: dict[Any, Node] = {}
        first_line: dict[Any, int] = {}
        for key_source, value_source in source.value:
            place = self.place(key_source)
            if key_source.tag == "tag:yaml.org,2002:merge":
                merged = self.node(value_source, place, path)
                for parent in reversed(merged.value if isinstance(merged.value, list) else [merged]):
                    if isinstance(parent.value, dict):
                        inherited.update(parent.value)
                    else:
                        self.problems.add(place, path, "'<<' must name a mapping or a list of mappings")
                continue
            key = scalar_value(key_source) if isinstance(key_source, yaml.ScalarNode) else None
            if key is None:
                self.problems.add(place, path, "a key must be a plain word, not a list, a mapping or null")
                continue
            if key in first_line:
                message = f"duplicate key, first given at line {first_line[key]}; keep one of them"
                self.problems.add(place, (*path, key), message)
            first_line.setdefault(key, key_source.start_mark.line + 1)
            own[key] = self.node(value_source, place, (*path, key))
        return {**inherited, **own}
