"""Configs as text: complete YAML that loads back to an equal config, with origins and documentation on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import yaml

from ..core.fields import fields_of
from ..core.options import config_key, field_docs
from ..core.scalars import IMPLICIT_RESOLVERS
from ..guards import REGISTRY
from .private import digest_lines, digests, with_private_unresolved
from .schema import Config
from .tree import TARGET, KeyPath, dotted, escape


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars."""
    return dataclasses.asdict(config, dict_factory=lambda items: {config_key(name): value for name, value in items})


def to_yaml(config: Config, origins: Mapping[str, str] | None = None, docs: bool = False) -> str:
    """Complete YAML; `load_config` of it gives an equal config. Values from the environment are not resolved in it.

    `origins` puts where each value came from behind it, `docs` puts what each field does above it.
    """
    data = to_dict(config)
    lines = _mapping(with_private_unresolved(config, _escaped(data)), (), Config, origins, docs)
    return "\n".join(lines).rstrip("\n") + "\n" + digest_lines(digests(config, data))


def to_public_dict(config: Config) -> dict[str, Any]:
    """`to_dict`, with values from the environment as they were written."""
    return with_private_unresolved(config, to_dict(config))


def _mapping(
    data: Mapping[Any, Any], path: KeyPath, cls: type | None, origins: Mapping[str, str] | None, docs: bool
) -> list[str]:
    lines: list[str] = []
    indent = "  " * len(path)
    documented = field_docs(cls) if docs and cls is not None else {}
    for key, value in data.items():
        here = (*path, key)
        lines += [f"{indent}# {line}" for line in documented.get(key, "").splitlines()]
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{_flow(key)}:")
            lines += _mapping(value, here, _class_of(here, value), origins, docs)
        else:
            origin = "" if origins is None else f"  # {origins.get(dotted(here), 'default')}"
            lines.append(f"{indent}{_flow(key)}: {_flow(value)}{origin}")
        if docs and len(path) == 0:
            lines.append("")
    return lines


def _class_of(path: KeyPath, value: Mapping[Any, Any]) -> type | None:
    """The dataclass whose fields document a section."""
    if path[0] == "guards" and len(path) == 2 and TARGET not in value and path[1] in REGISTRY:
        return REGISTRY[path[1]].Config
    if len(path) == 1:
        return fields_of(Config)[path[0]].section
    return None


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our loader or any YAML 1.1 reader would not read back as the same string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *IMPLICIT_RESOLVERS.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *IMPLICIT_RESOLVERS}
}


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Between single quotes, exotic line breaks such as \x85 would be read as spaces.
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_Dumper.add_representer(float, _float)
_Dumper.add_representer(str, _str)


def _flow(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...").removesuffix("\n")
