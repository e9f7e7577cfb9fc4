"""Replaces `${…}` in a config tree by what it refers to."""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .tree import BROKEN, TARGET, KeyPath, Node, Problems, dotted, from_python, leaves, plain, rewrite

ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)")


def interpolate(tree: Node, problems: Problems, private: dict[KeyPath, str] | None = None) -> Node:
    """The tree with every interpolation resolved; those that cannot be are added to `problems`.

    What holds a value of the environment is added to `private`, as it should be shown to others: not resolved.
    """
    found_at: list[KeyPath] = []
    variables = {name: os.environ.get(name, "") for name in variables_in(tree)}

    def note_private(node: Node, path: KeyPath, written: str) -> Node:
        if private is not None and TARGET not in path and isinstance(node.value, (str, int, float)):
            if ENVIRONMENT.search(written):
                private[path] = written
            elif found := [name for name, value in variables.items() if len(value) > 3 and value in str(node.value)]:
                private[path] = str(node.value)
                for name in found:
                    private[path] = private[path].replace(variables[name], f"${{oc.env:{name}}}")
        return node

    def note_private_parts(made: Node, path: KeyPath, written: str) -> None:
        """Of a list or a section that was made from a variable, the parts show nothing of how they were written."""
        inside = [] if private is None else [node for _, node in leaves(made)]
        if private is None or any(below[-1:] == (TARGET,) for below, _ in leaves(made)):
            return
        texts = str([plain(node) for node in inside])
        values = [part for value in variables.values() for part in _parts_of(value)]
        if ENVIRONMENT.search(written) or any(part in texts for part in values):
            private[path] = written

    def without_unreadable(node: Node, path: KeyPath) -> Node:
        """OmegaConf refuses a whole tree for one syntax error: find them one by one."""
        if not _is_interpolation(node):
            return node
        found_at.append(path)
        if len(node.value) > MAX_LENGTH:
            problems.add(
                node.place, path, f"an interpolation of {len(node.value)} characters; {MAX_LENGTH} are allowed"
            )
            return Node(BROKEN, node.place)
        try:
            OmegaConf.create({"value": node.value})
        except (OmegaConfBaseException, RecursionError) as error:
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
        made = from_python(found, node.place, problems, path)
        if not variables:
            return made
        written = node.value if not isinstance(made.value, (dict, list)) else ""
        if not written:
            note_private_parts(made, path, node.value)
        return rewrite(made, lambda below, rest: note_private(below, (*path, *rest), written))

    tree = rewrite(tree, without_unreadable)
    if not found_at:
        return tree
    if culprit := _explosion(tree):
        problems.append(
            f"the interpolations multiply: {culprit!r} amounts to more than {MAX_SIZE} characters; write it out"
        )
        return tree
    try:
        container = OmegaConf.create(plain(tree))
    except (OmegaConfBaseException, RecursionError) as error:
        problems.append(_first_line(error))
        return tree
    return rewrite(tree, resolved)


MAX_LENGTH, MAX_SIZE, MAX_NESTED = 4000, 1_000_000, 40
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def _explosion(tree: Node) -> str | None:
    """An interpolation that would grow without bounds, because each of several refers to others several times. Found without
    resolving any."""
    texts = {dotted(path): node.value for path, node in leaves(tree) if _is_interpolation(node)}
    sizes: dict[str, int] = {}

    def size_of(key: str, depth: int) -> int:
        if key in sizes or depth > 50:  # a circle is reported when it is resolved
            return sizes.get(key, 1)
        inside = [name for name in texts if name == key or name.startswith(f"{key}.")]
        total = 0
        sizes[key] = 1
        for name in inside:
            used = (part.split(":")[-1].strip() for part in _REFERENCE.findall(texts[name]))
            total += len(texts[name]) + sum(size_of(part, depth + 1) for part in used)
        sizes[key] = max(total, 1)
        return sizes[key]

    nested = 0
    for key, value in texts.items():
        text = str(value)
        if "oc.create" in text and "&" in text:
            return text
        is_plain = text.count("${") == len(_REFERENCE.findall(text)) and "${." not in text
        nested += 0 if is_plain else text.count("${")
        if size_of(key, 0) > MAX_SIZE or nested > MAX_NESTED:
            return text[:80]
    return None


def variables_in(tree: Node) -> set[str]:
    """Names of variables of the environment that interpolations read, as far as they are written out."""
    texts = [node.value for _, node in leaves(tree) if isinstance(node.value, (str, list))]
    return {name for text in texts for name in ENVIRONMENT.findall(str(plain(Node(text, tree.place))))}


def _parts_of(value: str) -> list[str]:
    """What `oc.decode` may take a variable apart into."""
    return [part for part in re.split(r"[\[\]{},:\s'\"]+", value) if len(part) > 3]


def _is_interpolation(node: Node) -> bool:
    return isinstance(node.value, str) and "${" in node.value


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
