"""Replaces `${…}` in a config tree by what it refers to."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .tree import BROKEN, KeyPath, Node, Problems, from_python, plain, rewrite


def interpolate(tree: Node, problems: Problems) -> Node:
    """The tree with every interpolation resolved; those that cannot be are added to `problems`."""
    found_at: list[KeyPath] = []

    def without_unreadable(node: Node, path: KeyPath) -> Node:
        """OmegaConf refuses a whole tree for one syntax error: find them one by one."""
        if not _is_interpolation(node):
            return node
        found_at.append(path)
        try:
            OmegaConf.create({"value": node.value})
        except OmegaConfBaseException as error:
            why = f"is not a valid interpolation ({_first_line(error)}); write \\${{ for a literal ${{"
            problems.add(node.place, path, f"{node.value!r} {why}")
            return Node(BROKEN, node.place)
        return node

    def resolved(node: Node, path: KeyPath) -> Node:
        if not _is_interpolation(node):
            return node
        try:
            found: Any = container
            for key in path:
                found = found[key]
            if isinstance(found, (DictConfig, ListConfig)):
                found = OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, RecursionError) as error:
            why = "it refers to itself" if isinstance(error, RecursionError) else _first_line(error)
            problems.add(node.place, path, f"{node.value!r} cannot be resolved: {why}")
            return Node(BROKEN, node.place)
        return from_python(found, node.place, problems, path)

    tree = rewrite(tree, without_unreadable)
    if not found_at:
        return tree
    try:
        container = OmegaConf.create(plain(tree))
    except OmegaConfBaseException as error:
        problems.append(_first_line(error))
        return tree
    return rewrite(tree, resolved)


def _is_interpolation(node: Node) -> bool:
    return isinstance(node.value, str) and "${" in node.value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
