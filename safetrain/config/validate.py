"""Checks a whole config tree against the schema and collects everything that is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..core.effects import effects
from ..core.fields import Field, Rejected, fields_of, show
from ..core.spelling import suggest
from ..guards import DEFAULT, REGISTRY
from .resolve import NotDefined
from .schema import LADDER, Config
from .signatures import find_definition
from .targets import check_target, split_target
from .tree import BROKEN, TARGET, KeyPath, Node, Place, Problems, plain


def validate(tree: Node, problems: Problems) -> Node:
    """The tree with every value as its field stores it; what is wrong is added to `problems`."""
    return _section(tree, Config, (), problems)


def _section(node: Node, cls: type, path: KeyPath, problems: Problems) -> Node:
    if node.value is BROKEN:
        return node
    if not isinstance(node.value, dict):
        accepted = ", ".join(fields_of(cls)) or "none"
        problems.add(node.place, path, f"{show(plain(node))} is not a section; its keys are: {accepted}")
        return node
    fields = fields_of(cls)
    checked = {}
    for key, child in node.value.items():
        if not isinstance(key, str) or key not in fields:
            problems.add(child.place, (*path, key), _unknown_key(key, fields, path))
        elif path == () and key == "guards":
            checked[key] = _guards(child, problems)
        else:
            checked[key] = _value(child, fields[key], (*path, key), problems)
            if (*path, key) == ("recovery", "ladder"):
                _check_rungs(checked[key], problems)
    return dataclasses.replace(node, value=checked)


def _unknown_key(key: object, fields: Iterable[str], path: KeyPath) -> str:
    if key == "extends":
        return "only a config file can extend others, at its top level"
    if isinstance(key, bool):
        return f"YAML reads this key as {show(key)}; put it in quotes"
    hint = suggest(key, fields)
    if "did you mean" not in hint:
        homes = [name for name, field in fields_of(Config).items() if field.section and key in fields_of(field.section)]
        if homes and path == ():
            hint = f", did you mean '{homes[0]}.{key}'?"
    return f"unknown key{hint}"


def _value(node: Node, field: Field, path: KeyPath, problems: Problems) -> Node:
    if field.section is not None:
        return _section(node, field.section, path, problems)
    if node.value is BROKEN:
        return node
    if field.is_target and field.is_list:
        return _targets(node, field, path, problems)
    if field.is_target:
        if node.value is None:
            if field.default is not None:
                problems.add(
                    node.place, path, f"null is not accepted, give {field.accepted}; delete the key for the default"
                )
            return node
        return _target(node, field, path, problems)
    if node.value == "???":
        problems.add(node.place, path, f"must be given: {field.accepted}")
        return node
    try:
        return from_plain(node, field.read(plain(node), node.text))
    except Rejected as rejected:
        problems.add(node.place, path, str(rejected))
        return node


def _target(node: Node, field: Field, path: KeyPath, problems: Problems) -> Node:
    own: dict[str, Node] = {}
    if field.metadata.get("by_name") and isinstance(node.value, dict) and node.value and TARGET not in node.value:
        children = node.value.items()
        if all(isinstance(child.value, dict) and TARGET in child.value for _, child in children):
            return dataclasses.replace(
                node, value={name: check_target(child, (*path, name), problems) for name, child in children}
            )
    if isinstance(node.value, dict):
        own = {key: child for key, child in node.value.items() if key in field.metadata["own"]}
        for key, child in own.items():
            if child.value not in (choices := field.metadata["own"][key]):
                message = f"{show(plain(child))} is not accepted, give one of {', '.join(choices)}"
                problems.add(child.place, (*path, key), message)
        node = dataclasses.replace(node, value={k: v for k, v in node.value.items() if k not in own})
    node = check_target(node, path, problems, field.metadata["num_injected"], field.metadata["takes_arguments"])
    return dataclasses.replace(node, value={**node.value, **own}) if own else node


def _targets(node: Node, field: Field, path: KeyPath, problems: Problems) -> Node:
    if not isinstance(node.value, list):
        problems.add(node.place, path, f"{show(node.value)} is not accepted, give {field.accepted}")
        return node
    checked = [check_target(child, (*path, index), problems) for index, child in enumerate(node.value)]
    return dataclasses.replace(node, value=checked)


def from_plain(node: Node, value: object) -> Node:
    """`value` at the place of `node`."""
    if isinstance(value, dict):
        return dataclasses.replace(node, value={key: from_plain(node, child) for key, child in value.items()})
    if isinstance(value, list):
        return dataclasses.replace(node, value=[from_plain(node, child) for child in value])
    return dataclasses.replace(node, value=value)


def _guards(node: Node, problems: Problems) -> Node:
    if not isinstance(node.value, dict):
        names = ", ".join(REGISTRY)
        problems.add(node.place, ("guards",), f"{show(node.value)} is not a section of guards by name: {names}")
        return node
    checked = {}
    for name, child in node.value.items():
        path = ("guards", name)
        if child.value is BROKEN:
            continue
        if child.value is None and child.text == "":
            message = "nothing after the colon; write 'null' to turn the guard off, or '{}' for its defaults"
            problems.add(child.place, path, message)
        elif isinstance(child.value, dict) and TARGET in child.value:
            checked[name] = check_target(child, path, problems)
        elif name not in REGISTRY:
            message = f"unknown guard{suggest(name, REGISTRY)} (a guard of your own needs a {TARGET})"
            problems.add(child.place, path, message)
        elif child.value is None:
            checked[name] = child
        else:
            checked[name] = _section(child, REGISTRY[name].Config, path, problems)
    return dataclasses.replace(node, value=checked)


def _check_rungs(ladder: Node, problems: Problems) -> None:
    for rung in ladder.value if isinstance(ladder.value, list) else ():
        name, path = rung.value, ("recovery", "ladder")
        if not isinstance(name, str) or name in LADDER:
            continue
        if "." not in name:
            hint = suggest(name, LADDER)
            problems.add(
                rung.place, path, f"unknown rung {name!r}{hint} (one of your own is pkg.mod.Class or ./file.py:Class)"
            )
            continue
        try:
            file, name = split_target(name)
            find_definition(name, file)
        except (ValueError, NotDefined) as error:
            problems.add(rung.place, path, str(error))


def complete_guards(guards: Node, defaults: Node, problems: Problems) -> Node:
    """Every default guard and every configured one with all its options, those included that others imply."""
    if not isinstance(guards.value, dict):
        return guards
    complete = {}
    for name in dict.fromkeys([*DEFAULT, *guards.value]):
        node = guards.value.get(name)
        if node is None:
            node = Node({}, defaults.place)
        if isinstance(node.value, dict) and TARGET not in node.value and name in REGISTRY:
            default = guard_defaults(name, defaults)
            known = {option: node.value.get(option, value) for option, value in default.items()}
            known |= _implied(name, node, defaults.place, problems)
            node = dataclasses.replace(node, value={**node.value, **known})
        complete[name] = node
    return dataclasses.replace(guards, value=complete)


def _implied(guard: str, node: Node, default: Place, problems: Problems) -> dict[str, Node]:
    """What the options that were given imply. Those that would have no effect are problems."""
    given = {option: child for option, child in node.value.items() if child.place != default}
    found = effects(fields_of(REGISTRY[guard].Config), {option: plain(child) for option, child in given.items()})
    for option, problem in found.problems.items():
        problems.add(given[option].place, ("guards", guard, option), problem)
    places = [child.place for child in given.values()]
    return {option: from_plain(Node(None, places[0]), value) for option, value in found.implied.items()}


def guard_defaults(name: str, defaults: Node) -> dict[str, Node]:
    fields = fields_of(REGISTRY[name].Config).values()
    return {field.name: from_plain(Node(None, defaults.place), field.default) for field in fields}
