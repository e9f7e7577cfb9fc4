"""`manifest.json` of a checkpoint: step, epoch, metric, and the size and checksum of each of its files and of itself."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..core.files import read_text, to_json

SCHEMA = 1
NAME = "manifest.json"
MAX_MANIFEST = 2**24


class Damaged(Exception):
    """A checkpoint is not as it was written; the message says what is wrong with it."""


class UnknownSchema(Damaged):
    """An intact checkpoint of a format that this version does not know."""


@dataclass(frozen=True)
class Manifest:
    step: int
    """Number of attempted steps."""
    num_committed: int
    epoch: int
    time: str
    version: str
    """Of safetrain."""
    metric: float | None = None
    """`loop.monitor`, if there was an evaluation at exactly this step."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`bytes` and `xxh3_128` of each file, by its name."""
    schema: int = SCHEMA

    def wrong_types(self) -> str | None:
        """The fields that are not what they should be, in a file that somebody else wrote."""
        kinds = {"step": int, "num_committed": int, "epoch": int, "time": str, "version": str, "files": dict}
        wrong = [name for name, kind in kinds.items() if type(getattr(self, name)) is not kind]
        wrong += [name for name in ("step", "num_committed", "epoch") if name not in wrong and getattr(self, name) < 0]
        for file, about in () if "files" in wrong else self.files.items():
            if type(about) is not dict or type(about.get("bytes")) is not int or type(about.get("xxh3_128")) is not str:
                wrong.append(file)
        return f"wrong: {', '.join(wrong)}" if wrong else None

    def render(self) -> str:
        body = dataclasses.asdict(self)
        if self.metric is not None:
            body["metric"] = repr(self.metric)  # as text: it comes back bit for bit, also if infinite
        return _sealed(body)

    def verify_files(self, directory: Path, names: Iterable[str] | None = None) -> None:
        """Compare every file, or those of these names, with what was written. Raises Damaged."""
        for name in self.files if names is None else names:
            path, expected = directory / name, self.files[name]
            try:
                if (size := path.stat().st_size) != expected["bytes"]:
                    raise Damaged(f"{name} has {size} bytes, {expected['bytes']} were written")
                if checksum(path) != expected["xxh3_128"]:
                    raise Damaged(f"{name} does not match its checksum")
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror or error}") from error


def read_manifest(directory: Path) -> Manifest:
    """Raises Damaged, or UnknownSchema when it is intact but of another format."""
    try:
        text = read_text(directory / NAME, MAX_MANIFEST)
        body = json.loads(text)
        sound = isinstance(body, dict) and _sealed({k: v for k, v in body.items() if k != "checksum"}) == text
    except OSError as error:
        raise Damaged(f"{NAME} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{NAME} is not valid JSON") from error
    if not sound:
        raise Damaged(f"{NAME} does not match its checksum")
    if body.get("schema") != SCHEMA:
        raise UnknownSchema(
            f"its format has the version {body.get('schema')} (written by safetrain {body.get('version')}), and this safetrain "
            f"can read only version {SCHEMA}"
        )
    try:
        fields = {f.name: body[f.name] for f in dataclasses.fields(Manifest)}
        metric = fields.pop("metric")
        manifest = Manifest(**fields, metric=None if metric is None else float(metric))
        names_are_plain = all(Path(name).name == name for name in manifest.files)
        if problem := manifest.wrong_types():
            raise TypeError(problem)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{NAME} is incomplete: {error!r}") from error
    if not names_are_plain:
        raise Damaged(f"{NAME} names files outside its directory")
    return manifest


def checksum(path: Path) -> str:
    """128-bit XXH3 of a file: fast enough to cost nothing next to writing it."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return xxhash.xxh3_128(b"").hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return xxhash.xxh3_128(content).hexdigest()


def _sealed(body: dict[str, Any]) -> str:
    """JSON with its own checksum inside. Rendering is canonical, so that every bit of the file counts."""
    digest = xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return to_json({**dict(sorted(body.items())), "checksum": digest}, indent=1) + "\n"
