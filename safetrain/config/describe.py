"""The schema itself as text for people, and as JSON Schema for editors."""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Mapping
from typing import Any

from ..core.fields import Field, fields_of, members, show
from ..core.options import field_docs
from ..guards import DEFAULT, REGISTRY
from .schema import Config
from .targets import static_signature
from .tree import TARGET

WIDTH = 110


def schema_text(config: Config | None = None) -> str:
    """Every field with what it accepts, its default and what it does; with a config, also what its targets accept."""
    lines = [
        "extends: a file or a recipe, or a list of them",
        "    Configs to build on; later ones win, and this one over all.",
        "",
    ]
    for name, field in fields_of(Config).items():
        if name == "guards":
            lines += _guards_text()
        elif field.section is not None:
            lines += [f"{name}:", *_doc(Config, name, 1), "", *_section_text(field.section, 1)]
        else:
            lines += _field_text(Config, field, 0)
    if config is not None:
        lines += _targets_text(config)
    return "\n".join(lines).rstrip() + "\n"


def _section_text(cls: type, depth: int) -> list[str]:
    return [line for field in fields_of(cls).values() for line in _field_text(cls, field, depth)]


def _field_text(cls: type, field: Field, depth: int) -> list[str]:
    default = _spelt(field.default)
    return [
        f"{'    ' * depth}{field.name}: {field.accepted} (default: {default})",
        *_doc(cls, field.name, depth + 1),
        "",
    ]


def _spelt(default: Any) -> str:
    if isinstance(default, Mapping):
        return "{" + ", ".join(f"{key}: {_spelt(value)}" for key, value in default.items()) + "}"
    return default if isinstance(default, str) else show(default)


def _doc(cls: type, name: str, depth: int) -> list[str]:
    return textwrap.wrap(
        field_docs(cls).get(name, ""), WIDTH, initial_indent="    " * depth, subsequent_indent="    " * depth
    )


def _guards_text() -> list[str]:
    lines = ["guards:", *_doc(Config, "guards", 1), ""]
    for name, guard in REGISTRY.items():
        state = "on by default" if name in DEFAULT else "off by default"
        lines += [f"    {name}: {state}", "", *_section_text(guard.Config, 2)]
    return lines


def _targets_text(config: Config) -> list[str]:
    nodes = {name: getattr(config, name) for name, field in fields_of(Config).items() if field.is_target}
    nodes.update({"data.train": config.data.train, "data.eval": config.data.eval})
    nodes.update({f"logging.sinks.{index}": node for index, node in enumerate(config.logging.sinks)})
    nodes.update({f"guards.{name}": node for name, node in config.guards.items() if isinstance(node, dict)})
    lines = ["Targets of this config:", ""]
    for key, node in nodes.items():
        if node is not None:
            signature = static_signature(node[TARGET])
            lines += [f"    {key}: {node[TARGET]}{'(…)' if signature is None else signature}"]
    return lines


# --- JSON Schema -------------------------------------------------------------------------------------------------

_JSON_TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}
_JSON_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_ANY_TARGET = {"type": "object", "properties": {TARGET: {"type": "string"}}}
_GIVEN_TARGET = {**_ANY_TARGET, "required": [TARGET]}
_INTERPOLATION = {"$ref": "#/$defs/interpolation"}


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of config files."""
    schema = _section_json(Config)
    properties = schema["properties"]
    names = {"type": "string"}
    properties["extends"] = {"anyOf": [names, {"type": "array", "items": names}], "description": "Configs to build on."}
    properties["guards"] = {
        "description": field_docs(Config)["guards"],
        "type": ["object", "null"],
        "properties": {n: {"anyOf": [_section_json(guard.Config), _GIVEN_TARGET]} for n, guard in REGISTRY.items()},
        "additionalProperties": _GIVEN_TARGET,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "safetrain config",
        **schema,
        "$defs": {"interpolation": {"type": "string", "pattern": r"\$\{"}},
    }


def _section_json(cls: type) -> dict[str, Any]:
    properties = {name: _field_json(cls, field) for name, field in fields_of(cls).items()}
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _field_json(cls: type, field: Field) -> dict[str, Any]:
    description = {"description": field_docs(cls).get(field.name, "")}
    if field.section is not None:
        return {**_section_json(field.section), **description}
    if field.is_target and not field.is_list:
        accepted: list[dict[str, Any]] = [_ANY_TARGET, {"type": "null"}]
    else:
        accepted = [_type_json(member, field) for member in members(field.type)]
    return {"anyOf": [*accepted, _INTERPOLATION], "default": field.default, **description}


def _type_json(member: Any, field: Field) -> dict[str, Any]:
    kind = typing.get_origin(member) or member
    if kind is str and field.choices:
        return {"enum": list(field.choices)}
    if kind not in _JSON_TYPES:
        return {}
    bounds = {_JSON_BOUNDS[name]: limit for name, limit in field.bounds.items()} if kind in (int, float) else {}
    items = {"items": _GIVEN_TARGET} if field.is_target else {}
    return {"type": _JSON_TYPES[kind], **bounds, **items}
