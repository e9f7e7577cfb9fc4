"""Which package may import which, and how large a file may become."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "safetrain"
ARROW = [
    "errors",
    "core",
    "_private",
    "distributed",
    "tensors",
    "precision",
    "guards",
    "config",
    "data",
    "optim",
    "forensics",
    "checkpoint",
    "incidents",
    "telemetry",
    "report",
    "step",
    "recovery",
    "trainer",
    "hosts",
    "integrations",
    "safe",
    "lint",
    "preflight",
    "scaffold",
    "fixes",
    "cli",
]
"""Each may import only what stands to its left."""
MAX_LINES = 400

EXCEPTIONS = {
    ("errors", "core.incident"): "what TrainingStopped carries, for the type checker only",
    ("errors", "core.result"): "what TrainingStopped and Interrupted carry, for the type checker only",
    ("core.incident", "incidents.render"): "Incident.render() is public; the module is loaded when it is called",
    ("trainer.trainer", "preflight"): "SafeTrainer.check() is public; the package is loaded when it is called",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, without `safetrain.`; a package by its own name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
        for path in ROOT.rglob("*.py")
    }


def imports(name: str, path: Path) -> Iterator[str]:
    """What a module imports of safetrain, wherever in the file: also inside functions and for the type checker."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("safetrain.") for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.level or _is_ours(node.module or "")):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = (node.module or "") if node.level else (node.module or "").partition(".")[2]
            base = ".".join([*start, *([module] if module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield inner if inner in modules() or not base else base


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "safetrain"


def against_the_arrow() -> set[tuple[str, str]]:
    found = set()
    for name, path in modules().items():
        if name in ("", "__main__"):  # the public names, imported when they are first used
            continue
        source = name.partition(".")[0]
        for target in imports(name, path):
            package = target.partition(".")[0]
            if target != "__version__" and package != source and ARROW.index(package) > ARROW.index(source):
                found.add((name, target))
    return found


def test_imports_point_one_way() -> None:
    assert against_the_arrow() == EXCEPTIONS.keys()


def test_the_top_holds_the_public_names_the_errors_and_packages() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages | {"errors"} == set(ARROW)


def test_no_package_has_a_single_module() -> None:
    sizes = Counter(path.parent for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    assert [str(package.relative_to(ROOT)) for package, size in sizes.items() if size == 1] == []


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values()
    }
    assert {file for file, length in lengths.items() if length > MAX_LINES} == set()
