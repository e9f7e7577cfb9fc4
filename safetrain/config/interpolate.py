"""Replaces `${…}` in a config tree by what it refers to."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .tree import BROKEN, KeyPath, Node, Problems, from_python, plain


def interpolate(tree: Node, problems: Problems) -> Node:
    """The tree with every interpolation resolved; those that cannot be are added to `problems`."""
    if not _has_interpolation(tree):
        return tree
    tree = _without_unreadable(tree, (), problems)
    try:
        container = OmegaConf.create(plain(tree))
    except OmegaConfBaseException as error:
        problems.append(_first_line(error))
        return tree
    return _resolved(tree, container, (), problems)


def _has_interpolation(node: Node) -> bool:
    if isinstance(node.value, dict):
        return any(_has_interpolation(child) for child in node.value.values())
    if isinstance(node.value, list):
        return any(_has_interpolation(child) for child in node.value)
    return isinstance(node.value, str) and "${" in node.value


def _without_unreadable(node: Node, path: KeyPath, problems: Problems) -> Node:
    """OmegaConf refuses a whole tree for one syntax error: find them one by one."""
    if isinstance(node.value, dict):
        value: Any = {k: _without_unreadable(child, (*path, k), problems) for k, child in node.value.items()}
        return dataclasses.replace(node, value=value)
    if isinstance(node.value, list):
        value = [_without_unreadable(child, (*path, i), problems) for i, child in enumerate(node.value)]
        return dataclasses.replace(node, value=value)
    if isinstance(node.value, str) and "${" in node.value:
        try:
            OmegaConf.create({"value": node.value})
        except OmegaConfBaseException as error:
            message = (
                f"{node.value!r} is not a valid interpolation ({_first_line(error)}); write \\${{ for a literal ${{"
            )
            problems.add(node.place, path, message)
            return Node(BROKEN, node.place)
    return node


def _resolved(node: Node, container: Any, path: KeyPath, problems: Problems) -> Node:
    if isinstance(node.value, dict):
        value: Any = {k: _resolved_child(child, container, (*path, k), problems) for k, child in node.value.items()}
    elif isinstance(node.value, list):
        value = [_resolved_child(child, container, (*path, i), problems) for i, child in enumerate(node.value)]
    else:
        return node
    return dataclasses.replace(node, value=value)


def _resolved_child(node: Node, container: Any, path: KeyPath, problems: Problems) -> Node:
    if isinstance(node.value, (dict, list)):
        return _resolved(node, container[path[-1]], path, problems)
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    try:
        found = container[path[-1]]
        if isinstance(found, (DictConfig, ListConfig)):
            found = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        why = "it refers to itself" if isinstance(error, RecursionError) else _first_line(error)
        problems.add(node.place, path, f"{node.value!r} cannot be resolved: {why}")
        return Node(BROKEN, node.place)
    return from_python(found, node.place, problems, path)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
