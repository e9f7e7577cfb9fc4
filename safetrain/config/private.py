"""Config values that come from the environment (`${oc.env:TOKEN}`): used, but never saved or shown.

The run directory, its report, TensorBoard and trackers get the interpolation as it was written. `config.yaml` ends with a short digest
of each value, so that a resume under another environment is noticed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .schema import Config
from .tree import KeyPath, dotted

_PRIVATE = "_private_values"
_DIGEST = re.compile(r"^# from the environment: (\S+) ([0-9a-f]{8})$", re.M)


def keep_private(config: Config, written: Mapping[KeyPath, str]) -> None:
    """Remember how these values were written. Goes with the config when it is copied."""
    vars(config)[_PRIVATE] = dict(written)


def private_keys(config: Config) -> list[str]:
    return [dotted(path) for path in vars(config).get(_PRIVATE, {})]


def private_notes(config: Config) -> list[str]:
    """What to say of them when a run starts."""
    keys = ", ".join(private_keys(config))
    return [f"from the environment, and not resolved in what is written: {keys}"] if keys else []


def with_private_unresolved(config: Config, data: dict[str, Any]) -> dict[str, Any]:
    """`data`, the config as dicts and lists, with these values as they were written; changed in place."""
    for path, written in vars(config).get(_PRIVATE, {}).items():
        parent = _find(data, path[:-1])
        if (isinstance(parent, dict) and path[-1] in parent) or (
            isinstance(parent, list) and isinstance(path[-1], int) and path[-1] < len(parent)
        ):
            parent[path[-1]] = written
    return data


def digests(config: Config, data: dict[str, Any]) -> dict[str, str]:
    """Eight hexadecimal digits for each of these values."""
    return {dotted(path): digest(dotted(path), _find(data, path)) for path in vars(config).get(_PRIVATE, {})}


def digest_lines(found: Mapping[str, str]) -> str:
    """As comments, for the end of a config file."""
    return "".join(f"# from the environment: {key} {digits}\n" for key, digits in found.items())


def read_digests(text: str) -> dict[str, str]:
    return dict(_DIGEST.findall(text))


def digest(key: str, value: Any) -> str:
    return hashlib.sha256(f"{key}={value}".encode("utf-8", "surrogateescape")).hexdigest()[:8]


def secrets_in(data: Any, written: Mapping[KeyPath, str], variables: Iterable[str]) -> dict[str, str]:
    """Values of the environment, each with how it was written: those of these variables, and what is at these places of `data`."""
    found = {os.environ[name]: f"${{oc.env:{name}}}" for name in variables if name in os.environ}
    for path, text in written.items():
        found.setdefault(str(_find(data, path)), text)
    return {value: text for value, text in found.items() if len(value) > 3}


def hidden(message: str, secrets: Mapping[str, str]) -> str:
    """The message with how they were written instead of the values. A long one may be quoted in part."""
    for value, text in sorted(secrets.items(), key=lambda item: -len(item[0])):
        for form in (value, repr(value)[1:-1]):
            message = message.replace(form, text)
        if len(value) > 20:
            message = re.sub(re.escape(repr(value)[1:21]) + r"[^\s'\"]*", lambda _, text=text: text, message)  # type: ignore[misc]
    return message


def _find(data: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data
