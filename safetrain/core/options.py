"""How a config field is declared: a dataclass field with its accepted values, documented by the string below it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import keyword
import textwrap
from collections.abc import Mapping
from typing import Any


def option(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
    only: Mapping[str, tuple[Any, ...]] | None = None,
    needs: tuple[str, ...] | None = None,
    within: str | None = None,
) -> Any:
    """A dataclass field whose value is checked when a config is loaded.

    `ge gt le lt` bound a number (NaN is outside every bound), `choices` lists the accepted strings. When an option does nothing
    under others, that is declared too: `only={"mode": ("norm",)}` has an effect with these values of `mode` only (given alone it
    implies the first), `needs` names options that must not be null, `within` one whose value this one must not exceed.

    >>> @dataclass
    ... class CeilingConfig:
    ...     limit: float = option(10.0, gt=0.0)
    ...     '''Refuse a step whose loss is above this.'''
    >>> CeilingConfig().limit
    10.0
    """
    limits = {
        "ge": ge,
        "gt": gt,
        "le": le,
        "lt": lt,
        "choices": choices,
        "only": only,
        "needs": needs,
        "within": within,
    }
    metadata = {name: limit for name, limit in limits.items() if limit is not None}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def config_key(attribute: str) -> str:
    """The key of a field in a config: its name, without the underscore that keeps a Python keyword apart (`async_`)."""
    bare = attribute.removesuffix("_")
    return bare if keyword.iskeyword(bare) else attribute


def config_attribute(key: str) -> str:
    """The other way round: `async` is the attribute `async_`."""
    return f"{key}_" if keyword.iskeyword(key) else key


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field of a dataclass, by its key in a config (inherited fields included)."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # classes made in an interactive session have no source
            continue
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                    docs[config_key(field.target.id)] = inspect.cleandoc(below.value.value)
    return docs
