"""How YAML reads plain scalars: which are numbers, booleans or null, and which are strings."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: `1e-3` is a number and a date is text; `1:30` is text too, not 90."""


_FLOAT = r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"""
_INT = r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)"


def _read_numbers_like_omegaconf() -> None:
    kept = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in kept]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT})$", re.X), list("-+0123456789."))
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"^(?:{_INT})$"), list("-+0123456789"))


_read_numbers_like_omegaconf()
IMPLICIT_RESOLVERS = Loader.yaml_implicit_resolvers
"""What plain text is read as something else than a string; who writes YAML must quote it."""


def scalar(text: str) -> Any:
    """What YAML makes of a piece of plain text; the text itself if it is more than a scalar."""
    try:
        document = yaml.compose(text, Loader=Loader)
    except (yaml.YAMLError, RecursionError):
        return text
    return scalar_value(document) if isinstance(document, yaml.ScalarNode) else text


def scalar_value(node: yaml.ScalarNode) -> Any:
    text = node.value
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return yaml.SafeLoader.bool_values[text.lower()]
    if kind == "int":
        digits = text.replace("_", "")
        return int(digits, 0) if "0x" in digits or "0b" in digits else int(digits)
    if kind == "float":
        digits = text.replace("_", "").lower()
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return text
