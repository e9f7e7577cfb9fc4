"""From a file, a recipe, a dict or a dataclass to a typed, checked, complete `Config`."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..core.fields import fields_of
from ..core.options import config_attribute, config_key
from ..errors import ConfigError
from ..guards import DEFAULT, REGISTRY
from .interpolate import interpolate, variables_in
from .merge import Override, apply_overrides, merge
from .private import hidden, keep_private, secrets_in
from .schema import Config
from .sources import FileReader, find_config
from .targets import with_absolute_targets
from .tree import TARGET, KeyPath, Node, Place, Problems, dotted, escape, from_python, leaves, plain, rewrite
from .validate import complete_guards, validate

Source = str | os.PathLike[str] | Mapping[str, Any] | DictConfig | Config | None


@dataclass(frozen=True)
class LoadedConfig:
    """A config with its history."""

    config: Config
    origins: Mapping[str, str]
    """Where each value came from, by dotted key: `default`, `base.yaml:12`, `override`, `dict`, or a flag's name."""
    source: Path | None
    """The file it was loaded from, if any."""


def load_config(source: Source = None, overrides: Iterable[str | Override] = ()) -> Config:
    """A complete, checked config.

    `source` is a path, a recipe's name, a dict, an OmegaConf node, a `Config`, or None for the defaults; what it leaves
    out is filled with defaults. A `Config` that was loaded before and not changed since is only copied. `overrides` are
    `key=value` (the value in YAML) and `~key` (delete). Raises one `ConfigError` that lists everything that is wrong.

    >>> config = load_config({"loop": {"max_steps": 100}}, ["guards.clip.mode=norm", "~guards.stall"])
    >>> config.loop.max_steps, config.guards["clip"].max_norm, config.guards["stall"]
    (100, 1.0, None)
    """
    if isinstance(source, Config) and not overrides and _is_checked(source):
        return copy.deepcopy(source)
    return load(source, overrides).config


def load(source: Source = None, overrides: Iterable[str | Override] = ()) -> LoadedConfig:
    """`load_config`, and where each value came from."""
    problems = Problems()
    defaults = _defaults()
    tree, path = _read(source, problems)
    changes = _parse(overrides, problems)
    if tree is None:
        if problems:
            raise ConfigError(problems)
        tree = Node({}, defaults.place)
    tree = merge(defaults, tree)
    tree = apply_overrides(tree, defaults, changes, problems)
    tree = _named_after_file(tree, path)
    private: dict[KeyPath, str] = {}
    variables = variables_in(tree)
    tree = with_absolute_targets(interpolate(tree, problems, private))
    tree = tree.having("guards", complete_guards(tree.value["guards"], defaults, problems))
    resolved = plain(tree) if private else {}
    tree = validate(tree, problems)
    if problems:
        secrets = secrets_in(resolved, private, variables)
        raise ConfigError([hidden(problem, secrets) for problem in problems])
    origins = {dotted(key): node.place.origin for key, node in leaves(tree)}
    config = _typed(tree)
    vars(config)[_CHECKED] = repr(config)
    keep_private(config, private)
    return LoadedConfig(config, origins, path)


_CHECKED = "_checked"
"""Attribute of a loaded config: how it read when it was checked. A config that was changed since is checked again."""


_CONSOLE = "_console_to_write"


def printing(config: Config, console: str) -> Config:
    """The config with another `logging.console` for this process, which a resume does not read: the file keeps the one it had."""
    vars(config)[_CONSOLE] = vars(config).get(_CONSOLE, config.logging.console)
    config.logging.console = console
    vars(config)[_CHECKED] = repr(config)
    return config


def to_write(config: Config) -> Config:
    """What is written into the run's directory."""
    if _CONSOLE not in vars(config):
        return config
    written = copy.deepcopy(config)
    written.logging.console = vars(config)[_CONSOLE]
    return written


def _is_checked(config: Config) -> bool:
    return vars(config).get(_CHECKED) == repr(config)


def _defaults() -> Node:
    place = Place("default", "default", Path.cwd())
    tree = from_python(Config(), place, Problems(), literal=True)
    guards = Node({name: Node({}, place) for name in DEFAULT}, place)
    return tree.having("guards", complete_guards(guards, tree, Problems()))


def _read(source: Source, problems: Problems) -> tuple[Node | None, Path | None]:
    if source is None:
        return None, None
    if isinstance(source, (str, os.PathLike)):
        try:
            path = find_config(source if isinstance(source, str) else Path(source), Path.cwd())
        except LookupError as error:
            problems.append(str(error.args[0]))
            return None, None
        return FileReader(path, problems).read(path), path
    data: Any = source
    kind = "dict"
    if isinstance(source, DictConfig):
        kind = "OmegaConf"
        data = OmegaConf.to_container(source, resolve=False)
        if OmegaConf.get_type(source) is Config:  # its keys are the names of attributes
            data = {name: _renamed(value, config_key) for name, value in data.items()}
    elif isinstance(source, Config):
        kind = "Config"
    if not isinstance(data, (Mapping, Config)):
        accepted = "a path, a recipe's name, a dict, an OmegaConf mapping, or a Config"
        problems.append(f"a config cannot be read from a {type(source).__name__}; give {accepted}")
        return None, None
    place = Place(kind, kind, Path.cwd())
    # The strings of a Config are final; those of a dict may hold interpolations, as in a file.
    tree = with_absolute_targets(from_python(data, place, problems, literal=isinstance(data, Config)))
    reader = FileReader(Path.cwd() / kind, problems)
    return (tree if isinstance(data, Config) else reader.extend(tree, Path.cwd(), ())), None


def _parse(overrides: Iterable[str | Override], problems: Problems) -> list[Override]:
    if isinstance(overrides, str):
        problems.append(f"overrides must be a list of strings, not the string {overrides!r}")
        return []
    parsed = []
    for override in overrides:
        try:
            parsed.append(override if isinstance(override, Override) else Override.parse(override))
        except ValueError as error:
            problems.append(f"override {override!r}: {error}")
    return parsed


def _named_after_file(tree: Node, path: Path | None) -> Node:
    name = tree.get("name")
    if path is None or name is None or name.place.origin != "default":
        return tree
    return tree.having("name", Node(escape(path.stem), dataclasses.replace(name.place, origin=path.name)))


def _typed(tree: Node) -> Config:
    data = plain(rewrite(tree, _escaped))
    guards = data.pop("guards")
    sections = {name for name, field in fields_of(Config).items() if field.section is not None}
    data = {name: _renamed(value, config_attribute) if name in sections else value for name, value in data.items()}
    # The data is complete; a default target below it would leak its arguments into another target.
    empty: dict[str, Any] = {
        name: {} for name, field in fields_of(Config).items() if field.is_target and field.default is not None
    }
    try:
        config = cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config(**empty)), data)))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    config.guards = {name: _typed_guard(name, options) for name, options in guards.items()}
    return config


def _typed_guard(name: str, options: dict[str, Any] | None) -> Any:
    if options is None:
        return None
    try:
        if TARGET in options:
            return OmegaConf.to_object(OmegaConf.create(options))
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(REGISTRY[name].Config), options))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"guards.{name}: {error}") from error


def _renamed(section: Any, rename: Callable[[str], str]) -> Any:
    return {rename(key): value for key, value in section.items()} if isinstance(section, dict) else section


def _escaped(node: Node, path: KeyPath) -> Node:
    return dataclasses.replace(node, value=escape(node.value)) if isinstance(node.value, str) else node
