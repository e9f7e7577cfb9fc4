"""What a field of the schema accepts: parsed from its declaration, described in words, and used to check a value."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .options import config_key
from .scalars import scalar

_BOUNDS = {"ge": ("≥", operator.ge), "gt": (">", operator.gt), "le": ("≤", operator.le), "lt": ("<", operator.lt)}
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def target(
    *, num_injected: int = 0, takes_arguments: bool = True, own: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, Any]:
    """Metadata of a dataclass field that holds a `_target_` with its arguments, or a list of them.

    The first `num_injected` positional arguments are given by safetrain, not by the config. `own`: further keys with their choices,
    which are settings of safetrain and no arguments.
    """
    return {"target": True, "num_injected": num_injected, "takes_arguments": takes_arguments, "own": dict(own or {})}


class Rejected(Exception):
    """A value that a field does not accept; the message says why and what is accepted."""


@dataclass(frozen=True)
class Field:
    """One field of a config dataclass."""

    name: str
    type: Any
    default: Any
    metadata: Mapping[str, Any]

    @property
    def section(self) -> type | None:
        """The dataclass of a nested section, None for a value."""
        return self.type if dataclasses.is_dataclass(self.type) and isinstance(self.type, type) else None

    @property
    def is_target(self) -> bool:
        return bool(self.metadata.get("target"))

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is list

    @property
    def bounds(self) -> dict[str, float]:
        return {name: self.metadata[name] for name in _BOUNDS if name in self.metadata}

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.metadata.get("choices", ()))

    @property
    def accepted(self) -> str:
        """In words: `an integer ≥ 1 or null`."""
        if self.is_target:
            what = "a list (a _target_ with its arguments each)" if self.is_list else "a _target_ with its arguments"
            return what + (" or null" if type(None) in members(self.type) else "")
        return describe(self.type, self.bounds, self.choices)

    def read(self, value: Any, text: str | None = None) -> Any:
        """The value as this field stores it. `text` is how it was written. Raises Rejected."""
        if isinstance(value, bool) and bool not in members(self.type) and self.choices:
            return self._read_choice_from_bool(value, text)
        try:
            result = _convert(value, text, self.type)
        except ValueError:
            raise Rejected(f"{show(value)} is not accepted, give {self.accepted}") from None
        for item in result if isinstance(result, list) else [result]:
            if isinstance(item, str) and self.choices and item not in self.choices:
                raise Rejected(f"{item!r} is not accepted, give {self.accepted}")
        if isinstance(result, (int, float)) and not isinstance(result, bool) and self.bounds:
            outside = not all(_BOUNDS[name][1](result, limit) for name, limit in self.bounds.items())
            if outside or not math.isfinite(result):
                raise Rejected(f"{show(result)} is out of range, give {self.accepted}")
        return result

    def _read_choice_from_bool(self, value: bool, text: str | None) -> str:
        if text in self.choices:
            return text
        if not value and "off" in self.choices:
            return "off"
        written = f"YAML reads {text!r} as {show(value)}" if text else f"{show(value)} is not accepted"
        raise Rejected(f"{written}, did you mean {self.default!r}? Give {self.accepted}")


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a config dataclass by their key."""
    hints = typing.get_type_hints(cls)
    fields = {}
    for field in dataclasses.fields(cls):
        default: Any = None
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init:
            key = config_key(field.name)
            fields[key] = Field(key, hints[field.name], default, field.metadata)
    return fields


def describe(hint: Any, bounds: Mapping[str, float] | None = None, choices: tuple[str, ...] = ()) -> str:
    """What a type accepts, in words."""
    limits = " and ".join(f"{_BOUNDS[name][0]} {limit:g}" for name, limit in (bounds or {}).items())
    words = []
    for member in members(hint):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is typing.Literal:
            words.append(" or ".join(repr(choice) for choice in args))
        elif member is str and choices:
            words.append(f"one of {', '.join(choices)}")
        elif member in (int, float) and limits:
            words.append(f"{_WORDS[member]} {limits}")
        elif (origin or member) in (list, tuple):
            items = {arg for arg in args if arg is not Ellipsis}
            each = sorted(describe(item, choices=choices) for item in items)
            words.append("a list" + (f" ({', '.join(each)} each)" if each else ""))
        elif (origin or member) is dict:
            words.append("a mapping")
        else:
            words.append(_WORDS.get(member, "anything" if member is Any else getattr(member, "__name__", str(member))))
    return " or ".join(words)


def show(value: Any) -> str:
    """A value as YAML would spell it, short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"a mapping with the keys {', '.join(map(str, value))}" if value else "an empty mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _convert(value: Any, text: str | None, hint: Any) -> Any:
    accepted = members(hint)
    if Any in accepted or type(value) in accepted:
        return value
    for member in accepted:
        try:
            return _convert_to(value, text, member)
        except ValueError:
            continue
    raise ValueError


def _convert_to(value: Any, text: str | None, member: Any) -> Any:
    origin, args = typing.get_origin(member), typing.get_args(member)
    kind = origin or member
    if origin is typing.Literal:
        if value in args:
            return value
    elif kind in (int, float, bool):
        # Environment variables and quoted numbers arrive as text.
        number = scalar(value) if isinstance(value, str) else value
        if kind is bool:
            if isinstance(number, bool):
                return number
        elif isinstance(number, (int, float)) and not isinstance(number, bool):
            if kind is float:
                return float(number)
            if isinstance(number, int) or number.is_integer():  # 1e3 is a fine number of steps
                return int(number)
    elif kind is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return text or str(value)  # `name: 007` stays 007
    elif kind in (list, tuple) and isinstance(value, (list, tuple)):
        if not args:
            return list(value)
        item_types = args if kind is tuple and Ellipsis not in args else (args[0],) * len(value)
        if len(item_types) == len(value):
            return [_convert(item, None, item_type) for item, item_type in zip(value, item_types, strict=True)]
    elif kind is dict and isinstance(value, dict):
        return {key: _convert(item, None, args[1]) for key, item in value.items()} if args else dict(value)
    elif isinstance(kind, type) and not typing.get_args(member) and kind not in (type(None), list, tuple, dict):
        return value  # a type this module does not know is checked by OmegaConf
    raise ValueError
