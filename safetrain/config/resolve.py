"""Finds the class or function that a dotted name refers to by reading source files: nothing is imported or run."""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._private.aliases import MOVED
from ..core.spelling import suggest

MAX_HOPS = 20
_DYNAMIC_CALLS = {"globals", "exec", "vars", "locals", "setattr"}


class NotDefined(Exception):
    """The target certainly does not exist; the message ends with what to do."""


class Unclear(Exception):
    """The source does not say for certain."""


@dataclass(frozen=True)
class Module:
    """A source file; `package` is what its relative imports start from."""

    name: str
    path: Path
    search: tuple[str, ...] = ()
    """Where its submodules are, for a package."""

    @property
    def package(self) -> str:
        return self.name if self.search else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Found:
    """A class or function in its source file; `owner` is the class of a method."""

    module: Module
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    owner: ast.ClassDef | None = None


def resolve(dotted_name: str) -> Module | Found:
    """What `package.module.Name` refers to. Raises NotDefined or Unclear."""
    top, *names = dotted_name.split(".")
    if (moved := MOVED.get(f"{top}.{names[0]}")) is not None:
        names = [*moved.split(".")[1:], *names[1:]]
    return walk(_top_level(top), names)


def resolve_in_file(path: Path, name: str) -> Module | Found:
    """What `name` refers to in a source file. Raises NotDefined or Unclear."""
    if not path.is_file():
        raise NotDefined(
            f"there is no file {path}; correct the path (it is relative to the config file; on the command line, to the current directory)"
        )
    return walk(Module(path.stem, path), name.split("."))


def _top_level(name: str, neighbours: tuple[str, ...] = ()) -> Module:
    first = [*neighbours, *([] if os.getcwd() in sys.path or "" in sys.path else [os.getcwd()])]
    spec = importlib.machinery.PathFinder.find_spec(name, first) if first else None
    if spec is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ValueError, ImportError):
            raise Unclear from None
    if spec is None:
        raise NotDefined(f"there is no module {name!r} to import; install it, or correct the name")
    return _module(spec)


def _module(spec: importlib.machinery.ModuleSpec) -> Module:
    search = tuple(spec.submodule_search_locations or ())
    if spec.origin and spec.origin.endswith(".py"):
        return Module(spec.name, Path(spec.origin), search)
    if search:  # a namespace package has no file of its own
        return Module(spec.name, Path(search[0]) / "__init__.py", search)
    raise Unclear


def _submodule(parent: Module, name: str) -> Module | None:
    if not parent.search:
        return None
    spec = find_below(f"{parent.name}.{name}", parent.search)
    return None if spec is None else _module(spec)


def find_below(name: str, search: Iterable[str]) -> importlib.machinery.ModuleSpec | None:
    """Where a module with that full name would come from, looked for in these directories only, without importing its package.

    `PathFinder` would ask the package, when that has no `__init__.py`.
    """
    portions: list[str] = []
    for directory in search:
        finder = pkgutil.get_importer(directory)
        spec = None if finder is None else finder.find_spec(name, None)
        if spec is not None and spec.loader is not None:
            return spec
        portions += [] if spec is None else list(spec.submodule_search_locations or ())
    if not portions:
        return None
    package = importlib.machinery.ModuleSpec(name, None, is_package=True)
    package.submodule_search_locations = portions
    return package


def walk(module: Module, names: list[str], hops: int = 0) -> Module | Found:
    """What `module.names[0].names[1]…` refers to."""
    if not names:
        return module
    head, rest = names[0], names[1:]
    if rest and (submodule := _submodule(module, head)) is not None:
        return walk(submodule, rest, hops)
    found = attribute(module, head, hops)
    if isinstance(found, Module) or not rest:
        return walk(found, rest, hops) if isinstance(found, Module) else found
    if len(rest) == 1 and isinstance(found.node, ast.ClassDef):  # an alternative constructor: Class.method
        for item in found.node.body:
            if isinstance(item, ast.FunctionDef) and item.name == rest[0]:
                return Found(found.module, item, found.node)
    raise Unclear


def attribute(module: Module, name: str, hops: int = 0) -> Module | Found:
    """What `name` refers to at the top level of a module."""
    if hops > MAX_HOPS:
        raise Unclear
    table = _bindings(module.path, _version(module.path))
    if name in table.names:
        return _follow(module, name, table.names[name], hops)
    unclear = table.dynamic
    for star in table.stars:
        try:
            return attribute(_imported_module(module, star.level, star.module), name, hops + 1)
        except NotDefined:
            continue
        except Unclear:
            unclear = True
    submodule = _submodule(module, name)
    if submodule is not None:
        return submodule
    if unclear:
        raise Unclear
    known = [n for n in table.names if not n.startswith("_")]
    raise NotDefined(f"{name!r} is not defined in {module.path}{suggest(name, known, 'defined there')}")


def _follow(module: Module, name: str, nodes: list[ast.stmt], hops: int) -> Module | Found:
    node = nodes[-1]
    if len(nodes) > 1 and not all(is_overload(earlier) for earlier in nodes[:-1]):
        raise Unclear
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return Found(module, node)
    if isinstance(node, ast.ImportFrom):
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        source = _imported_module(module, node.level, node.module)
        if source.path == module.path and original == name:  # `from package import submodule` inside the package itself
            return _walk_modules(source, [name])
        try:
            return attribute(source, original, hops + 1)
        except NotDefined:
            raise Unclear from None  # may work at run time all the same
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
        parts = alias.name.split(".") if alias.asname else alias.name.split(".")[:1]
        return _import(module, parts)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        return attribute(module, node.value.id, hops + 1)
    raise Unclear


def _imported_module(module: Module, level: int, name: str | None) -> Module:
    parts = name.split(".") if name else []
    if level == 0:
        return _import(module, parts)
    package = module.package.split(".") if module.package else []
    if level - 1 >= len(package):
        raise Unclear
    start = package[: len(package) - (level - 1)]
    return _import(module, [*start, *parts])


def _import(module: Module, names: list[str]) -> Module:
    """The module that `import names[0].names[1]…` in a module refers to."""
    # A file that is not in a package imports its neighbours.
    neighbours = () if "." in module.name or module.search else (str(module.path.parent),)
    try:
        return _walk_modules(_top_level(names[0], neighbours), names[1:])
    except NotDefined:
        raise Unclear from None  # the import may work at run time in a way the source does not show


def _walk_modules(module: Module, names: list[str]) -> Module:
    for name in names:
        submodule = _submodule(module, name)
        if submodule is None:
            raise Unclear
        module = submodule
    return module


@dataclass(frozen=True)
class _Bindings:
    """What the top level of a file defines."""

    names: dict[str, list[ast.stmt]]
    stars: list[ast.ImportFrom]
    dynamic: bool
    """Names may also come about in ways that only running the file shows."""


def _version(path: Path) -> tuple[int, int] | None:
    """Changes when the file does; None when there is no file, as for a namespace package."""
    if not path.is_file():
        return None
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=256)
def _bindings(path: Path, version: tuple[int, int] | None) -> _Bindings:
    try:
        tree = ast.parse(path.read_bytes()) if version is not None else ast.Module([], [])
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        raise Unclear from None
    names: dict[str, list[ast.stmt]] = {}
    stars: list[ast.ImportFrom] = []
    dynamic = False
    for statement in statements(tree.body):
        bound: list[str] = []
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound = [statement.name]
        elif isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            stars.append(statement)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            bound = [alias.asname or alias.name.split(".")[0] for alias in statement.names]
        else:
            bound = [
                n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))
            ]
            dynamic = dynamic or _runs_dynamic_code(statement)
        for name in bound:
            names.setdefault(name, []).append(statement)
    return _Bindings(names, stars, dynamic or "__getattr__" in names)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, inside `if`, `try`, `with` and loops as well."""
    for statement in body:
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for block in blocks:
                yield from statements(block)
        elif isinstance(statement, ast.Match):
            raise Unclear
        else:
            yield statement


def _runs_dynamic_code(statement: ast.stmt) -> bool:
    calls = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(isinstance(func, ast.Name) and func.id in _DYNAMIC_CALLS for func in calls)


def is_overload(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and "overload" in {
        last_word(decorator) for decorator in node.decorator_list
    }


def last_word(expression: ast.expr) -> str:
    """The last word of `a.b.c` or `a.b.c(…)`."""
    if isinstance(expression, ast.Call):
        expression = expression.func
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else "?"


def dotted_name(expression: ast.expr) -> list[str]:
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        return [*dotted_name(expression.value), expression.attr]
    raise Unclear
