"""Finds the Python files of paths, and checks them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from .check import check_source
from .finding import Finding

SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"})


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    num_files: int = 0
    num_lines: int = 0


def lint_paths(paths: Iterable[str | Path], codes: Collection[str] | None = None) -> Report:
    """Check files and, recursively, the Python files in directories."""
    report = Report()
    for path in python_files(paths):
        source = path.read_bytes()
        report.num_files += 1
        report.num_lines += source.count(b"\n")
        report.findings += check_source(source, str(path), codes)
    return report


def python_files(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Each file once; hidden and installed files below a directory are skipped. Raises UsageError for a missing path."""
    seen: set[str] = set()
    for given in map(Path, paths):
        if not given.exists():
            raise UsageError(f"there is no file or directory {given}.\nTo fix: correct the path.")
        for path in _below(given) if given.is_dir() else [given]:
            if (key := os.path.realpath(path)) not in seen:
                seen.add(key)
                yield path


def _below(directory: Path) -> Iterator[Path]:
    for root, directories, files in os.walk(directory):
        directories[:] = sorted(name for name in directories if name not in SKIPPED and not name.startswith("."))
        yield from (Path(root, name) for name in sorted(files) if name.endswith((".py", ".pyw")))
