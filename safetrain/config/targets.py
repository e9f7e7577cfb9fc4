"""Targets: `package.module.Name` or `file.py:Name` in a config, checked without importing them, then imported and called."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.fields import show
from ..core.scalars import scalar
from ..core.spelling import suggest
from ..errors import ConfigError
from .resolve import NotDefined
from .signatures import find_definition
from .tree import BROKEN, TARGET, KeyPath, Node, Problems, rewrite

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_DOTTED = re.compile(rf"{_NAME}\.[^\W\d]\w*")
_IN_FILE = re.compile(rf"(?P<file>.+\.py):(?P<name>{_NAME})", re.S)
_KEYWORDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def split_target(target: str) -> tuple[Path | None, str]:
    """The file (None for an importable name) and the name in it. Raises ValueError with what to do."""
    if match := _IN_FILE.fullmatch(target):
        return Path(match["file"]), match["name"]
    if _DOTTED.fullmatch(target):
        return None, target
    if target.endswith(".py"):
        raise ValueError(f"{target!r} names a file; add what to take from it: {target}:Name")
    raise ValueError(f"{target!r} is not a target; write package.module.Name or ./file.py:Name")


def absolute_target(target: str, directory: Path) -> str:
    """The target with its file made absolute, so that it means the same from anywhere."""
    match = None if "${" in target else _IN_FILE.fullmatch(target)
    if match is None:
        return target
    return f"{os.path.abspath(directory / Path(match['file']).expanduser())}:{match['name']}"


def with_absolute_targets(tree: Node) -> Node:
    """The tree with every file target made absolute; each is relative to the place where it was written."""

    def change(node: Node, path: KeyPath) -> Node:
        target = node.get(TARGET)
        if target is None or not isinstance(target.value, str):
            return node
        return node.having(TARGET, _absolute(target))

    tree = rewrite(tree, change)
    # `recovery.ladder` lists targets without a section around them.
    recovery = tree.get("recovery")
    ladder = None if recovery is None else recovery.get("ladder")
    if recovery is None or ladder is None or not isinstance(ladder.value, list):
        return tree
    rungs = [_absolute(rung) if isinstance(rung.value, str) else rung for rung in ladder.value]
    return tree.having("recovery", recovery.having("ladder", dataclasses.replace(ladder, value=rungs)))


def _absolute(target: Node) -> Node:
    return dataclasses.replace(target, value=absolute_target(target.value, target.place.directory))


# --- checking ----------------------------------------------------------------------------------------------------


def static_signature(target: str) -> Signature | None:
    """What the target can be called with, found without importing it; None if that is unclear, or it does not exist."""
    try:
        file, name = split_target(target)
        definition = find_definition(name, file)
    except (ValueError, NotDefined):
        return None
    return None if definition is None else definition.signature


def check_arguments(signature: Signature, given: Iterable[str], num_injected: int = 0) -> list[str]:
    """What is wrong with calling it with these keywords after `num_injected` positional arguments."""
    parameters = list(signature.parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    injected = {parameter.name for parameter in positional[:num_injected]}
    accepted = [p.name for p in parameters if p.kind in _KEYWORDS and p.name not in injected]
    problems = []
    if num_injected > len(positional) and Parameter.VAR_POSITIONAL not in kinds:
        problems.append(f"must accept {num_injected} positional argument(s) from safetrain, accepts {len(positional)}")
    for name in given:
        if name in injected:
            problems.append(f"argument {name!r} is given by safetrain; remove it")
        elif name not in accepted and Parameter.VAR_KEYWORD not in kinds:
            problems.append(f"unknown argument {name!r}{suggest(name, accepted)}")
    required = [p.name for p in parameters if p.kind in _KEYWORDS and p.default is Parameter.empty]
    missing = [name for name in required if name not in injected and name not in set(given)]
    if missing:
        problems.append(f"missing argument{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}")
    return problems


def check_target(
    node: Node, path: KeyPath, problems: Problems, num_injected: int = 0, takes_arguments: bool = True
) -> Node:
    """Check a node that must be a target, and the targets among its arguments, without importing anything."""
    if not isinstance(node.value, dict):
        problems.add(
            node.place, path, f"{show(node.value)} is not a target; write a section with '{TARGET}: pkg.mod.Name'"
        )
        return node
    target = node.get(TARGET)
    if target is None:
        hint = suggest(TARGET, [key for key in node.value if "target" in str(key)]) if node.value else ""
        hint = hint if "did you mean" in hint else ""
        spelt = f" ({hint.removeprefix(', did you mean ').removesuffix('?')} is spelt {TARGET})" if hint else ""
        problems.add(node.place, path, f"{TARGET} is missing{spelt}; add '{TARGET}: pkg.mod.Name' or './file.py:Name'")
        return node
    for key, child in node.value.items():
        if key != TARGET:
            _check_argument(child, (*path, key), problems)
            _check_quoted(child, target, (*path, key), problems)
    if target.value is BROKEN:
        return node
    if not isinstance(target.value, str):
        problems.add(target.place, (*path, TARGET), f"{show(target.value)} is not a target; write pkg.mod.Name")
        return node
    given = [key for key in node.value if key != TARGET]
    if given and not takes_arguments:
        problems.add(node.value[given[0]].place, (*path, given[0]), f"takes no arguments besides {TARGET}; remove it")
        return node
    try:
        file, name = split_target(target.value)
        definition = find_definition(name, file)
    except (ValueError, NotDefined) as error:
        problems.add(target.place, (*path, TARGET), str(error))
        return node
    if definition is not None and definition.signature is not None and takes_arguments:
        # A loss function is called with (model, batch) itself; a loss class is built first, and what it builds is called.
        injected = 0 if path == ("loss",) and definition.is_class else num_injected
        for message in check_arguments(definition.signature, given, injected):
            culprit = next((key for key in given if f"argument {key!r}" in message), TARGET)
            problems.add(node.value[culprit].place, path, f"{target.value}: {message}")
    return node


def _check_quoted(node: Node, target: Node, path: KeyPath, problems: Problems) -> None:
    """A number in quotes is text, which the target would only find out when it is used, if the parameter is a number."""
    if (
        not isinstance(node.value, str)
        or not isinstance(target.value, str)
        or not isinstance(scalar(node.value), (int, float))
    ):
        return
    signature = static_signature(target.value)
    parameter = None if signature is None else signature.parameters.get(path[-1])
    default = None if parameter is None else scalar(str(parameter.default))
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        problems.add(
            node.place, path, f"{show(node.value)} is text, because it is in quotes; write {node.value} without them"
        )


def _check_argument(node: Node, path: KeyPath, problems: Problems) -> None:
    if node.value == "???":
        problems.add(node.place, path, "must be given")
    if isinstance(node.value, list):
        for index, item in enumerate(node.value):
            _check_argument(item, (*path, index), problems)
    elif isinstance(node.value, dict):
        if TARGET in node.value:
            check_target(node, path, problems)
        else:
            for key, child in node.value.items():
                _check_argument(child, (*path, key), problems)


# --- importing and calling ----------------------------------------------------------------------------------------


def import_target(target: str) -> Any:
    """The object that a target names. What its module raises while it is imported passes through unchanged."""
    try:
        file, name = split_target(target)
    except ValueError as error:
        raise ConfigError(f"{TARGET}: {error}") from None
    if file is None:
        module, names = _import_longest(name)
    else:
        module, names = _import_file(Path(os.path.abspath(file))), name.split(".")
    found: Any = module
    for part in names:
        if not hasattr(found, part):
            known = [n for n in dir(found) if not n.startswith("_")]
            what = getattr(found, "__name__", type(found).__name__)
            raise ConfigError(f"{TARGET} {target!r}: {what!r} has no {part!r}{suggest(part, known, 'it has')}")
        found = getattr(found, part)
    return found


def _import_longest(dotted_name: str) -> tuple[ModuleType, list[str]]:
    """The longest part of the name that is a module, imported, and the names that remain."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
        importlib.invalidate_caches()
    parts = dotted_name.split(".")
    module = None
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        # A class or function ends the path of modules; a submodule may not be imported yet.
        if module is not None and not isinstance(getattr(module, parts[count - 1], module), ModuleType):
            return module, parts[count - 1 :]
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise  # the module is there, and something it needs is not
            if module is None:
                raise ConfigError(
                    f"{TARGET} {dotted_name!r}: there is no module {name!r} to import; install it, or correct the name"
                ) from None
            return module, parts[count - 1 :]
    assert module is not None
    return module, parts[-1:]


def _import_file(path: Path) -> ModuleType:
    """The module of a source file, loaded once.

    It is imported under its own name where that name finds this file, so that a neighbour's `import model` gets the same
    module and worker processes can unpickle what it defines; otherwise under a name made from its path.
    """
    if not path.is_file():
        raise ConfigError(
            f"{TARGET}: there is no file {path}; correct the path (it is relative to the config file; on the command line, to the current directory)"
        )
    for module in (sys.modules.get("__main__"), sys.modules.get(path.stem), sys.modules.get(_unique_name(path))):
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and os.path.abspath(file) == str(path):
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    if path.stem not in sys.modules and path.stem.isidentifier():
        spec = importlib.util.find_spec(path.stem)
        if spec is not None and spec.origin is not None and os.path.abspath(spec.origin) == str(path):
            return importlib.import_module(path.stem)
    name = _unique_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _unique_name(path: Path) -> str:
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def instantiate(node: Mapping[str, Any], *positional: Any) -> Any:
    """Import the target of a node, build the targets among its arguments, and call it."""
    function, arguments = _prepare(node, len(positional))
    return function(*positional, **arguments)


def instantiate_loss(node: Mapping[str, Any]) -> Callable[..., Any]:
    """The loss of a config: an instance of a class, or a function with its further arguments filled in."""
    if inspect.isclass(import_target(str(node.get(TARGET)))):
        return instantiate(node)  # type: ignore[no-any-return]
    function, arguments = _prepare(node, 2)
    return functools.partial(function, **arguments) if arguments else function


def _prepare(node: Mapping[str, Any], num_injected: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    target = node.get(TARGET)
    if not isinstance(target, str):
        raise ConfigError(
            f"{TARGET} is missing in {show(dict(node))}; add '{TARGET}: pkg.mod.Name' or './file.py:Name'"
        )
    function = import_target(target)
    if not callable(function):
        raise ConfigError(
            f"{TARGET} {target!r}: a {type(function).__name__} cannot be called; name a class or a function"
        )
    arguments = {key: value for key, value in node.items() if key != TARGET}
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # built-in functions may have none
        signature = None
    if signature is not None and (problems := check_arguments(signature, arguments, num_injected)):
        raise ConfigError([f"{target}: {problem}" for problem in problems])
    return function, {key: _build(value) for key, value in arguments.items()}


def _build(value: Any) -> Any:
    if isinstance(value, Mapping):
        return instantiate(value) if TARGET in value else {key: _build(child) for key, child in value.items()}
    return [_build(item) for item in value] if isinstance(value, list) else value
