"""Writes what is between these two comments in a page, from the code:

    <!-- generated: options guards.finite -->    the options of a section of the config, as a table
    <!-- generated: api safetrain Verdict -->     signature, docstring and examples of these names of a module, or of all;
                                                  `Class:fit,step` shows only these of its methods
    <!-- generated: commands -->                  every command with its options
    <!-- generated: checks -->                    every check of `safetrain check`
    <!-- generated: walk --max-depth 2 -->        what scripts/walk prints with these options
    <!-- generated: files -->                     every file of the package, with the first sentence of its docstring
    <!-- end generated -->

`docs/lint.md` is made whole, from the rules.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from safetrain.cli.main import COMMANDS, program
from safetrain.config.describe import _spelt as spelt
from safetrain.config.schema import Config
from safetrain.core.fields import Field, fields_of
from safetrain.core.options import field_docs
from safetrain.guards import REGISTRY
from safetrain.lint.document import document
from safetrain.preflight import CHECKS

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end generated -->)", flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    stale = {path: text for path, text in pages() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is not up to date. To fix: run scripts/docs")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in arguments else 0


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that has something generated in it, as it should be."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path.name == "lint.md":
            yield path, document()
        elif SECTION.search(text):
            yield path, SECTION.sub(lambda found: found[1] + "\n" + generated(found[2]) + "\n" + found[4], text)


def generated(what: str) -> str:
    kind, *rest = what.split()
    if kind == "options":
        return options(rest[0])
    if kind == "api":
        return api(rest[0], rest[1:])
    if kind == "commands":
        return commands()
    if kind == "checks":
        return checks()
    if kind == "walk":
        return walk(*rest)
    if kind == "files":
        return files()
    raise ValueError(f"nothing can be generated for {what!r}")


# ---- options -------------------------------------------------------------------------------------------------------


def options(key: str) -> str:
    """The table of one section: `loop`, `guards.clip`, or `.` for what is in no section."""
    if key == ".":
        cls: type = Config
    elif key.startswith("guards."):
        cls = REGISTRY[key.removeprefix("guards.")].Config
    else:
        section = fields_of(Config)[key].section
        assert section is not None, key
        cls = section
    rows = [_row(cls, field) for field in fields_of(cls).values() if field.section is None and field.name != "guards"]
    return "\n".join(["| option | default | accepts | what it does |", "|---|---|---|---|", *rows, ""])


def _row(cls: type, field: Field) -> str:
    doc = " ".join(field_docs(cls).get(field.name, "").split())
    cells = (f"`{field.name}`", f"`{spelt(field.default)}`", field.accepted.replace("_target_", "`_target_`"), doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- checks --------------------------------------------------------------------------------------------------------


def checks() -> str:
    head = ["| check | looks at | FAIL when | WARN when | fix |", "|---|---|---|---|---|"]
    rows = [
        f"| `{each.name}` | {each.looks_at} | {each.fails or 'never'} | {each.warns or 'never'} | {each.fix} |"
        for each in CHECKS
    ]
    return "\n".join([*head, *rows, ""])


# ---- the walk of a step --------------------------------------------------------------------------------------------


@functools.cache
def walk(*options: str) -> str:
    """In a process of its own: a profiler sees everything that the process does."""
    command = [sys.executable, str(ROOT / "scripts" / "walk.py"), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return f"<!-- drawing -->\n```text\n{done.stdout}```\n"


# ---- the files -----------------------------------------------------------------------------------------------------


def files() -> str:
    package = ROOT / "safetrain"
    paths = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    lines = []
    for directory in sorted({path.parent for path in paths}):
        for path in (path for path in paths if path.parent == directory):  # __init__.py is the first
            doc = ast.get_docstring(ast.parse((package / path).read_text(encoding="utf-8"))) or ""
            purpose = " ".join(doc.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
            is_package = directory.parts and path.name == "__init__.py"
            name = f"{directory.as_posix()}/" if is_package else "  " * len(directory.parts) + path.name
            lines.append(f"{name:<26}{purpose}".rstrip())
    return "\n".join(["<!-- drawing -->", "```text", *lines, "```", ""])


# ---- the API -------------------------------------------------------------------------------------------------------


def api(module_name: str, names: list[str]) -> str:
    module = importlib.import_module(module_name)
    return "\n".join(_entry(module, module_name, name) for name in names or module.__all__)


def _entry(module: Any, path: str, wanted: str) -> str:
    """`path` is what users import, also where the module lies elsewhere in the package."""
    name, _, members = wanted.partition(":")
    thing = getattr(module, name)
    lines = [f"### {name}", ""]
    if inspect.isclass(thing):
        lines += [f"`class {path}.{name}{_signature(thing)}`", "", *_class(thing, members)]
    elif callable(thing):
        lines += [f"`{path}.{name}{_signature(thing)}`", "", *_text(inspect.getdoc(thing) or "")]
    else:
        lines += [f"`{path}.{name}`", "", *_text(inspect.getdoc(thing) or "")]
    return "\n".join([*lines, ""]).replace("\n\n\n", "\n\n")


def _signature(thing: Any) -> str:
    if inspect.isclass(thing) and (issubclass(thing, enum.Enum) or not _has_own_constructor(thing)):
        return ""
    return _spelt_signature(inspect.signature(thing))


def _has_own_constructor(cls: type) -> bool:
    return any("__init__" in vars(base) for base in cls.__mro__ if base.__module__.startswith("safetrain"))


def _spelt_signature(signature: inspect.Signature) -> str:
    words, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        words.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(words)})"


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if repr(value) == "<factory>" or value is dataclasses.MISSING or callable(value) or dataclasses.is_dataclass(value):
        return "…"
    return repr(value)


def _class(cls: type, wanted: str) -> list[str]:
    lines = _text(inspect.getdoc(cls) or "" if "__doc__" in vars(cls) and not _is_made(cls) else "")
    if issubclass(cls, enum.Enum):
        docs = _member_docs(cls)
        return [*lines, *(_item(m.name, docs[m.name]) if docs else f"- `{m.name}` = {m.value!r}" for m in cls), ""]
    if dataclasses.is_dataclass(cls):
        docs = field_docs(cls)
        fields = [(f.name, str(f.type).replace("|", "or")) for f in dataclasses.fields(cls)]
        lines += [_item(f"{name}: {kind}", docs.get(name, "")) for name, kind in fields]
    for name, member in _own_members(cls):
        if wanted and name not in wanted.split(","):
            continue
        function = _function_of(member)
        doc = " ".join((inspect.getdoc(function) or "").split("\n>>> ")[0].split())
        shown = name if isinstance(member, PROPERTIES) else name + _spelt_signature(inspect.signature(function))
        lines.append(_item(shown, doc))
    return [*lines, ""]


def _member_docs(cls: type[enum.Enum]) -> dict[str, str]:
    """The string literal under each member of an enum."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        member.targets[0].id: below.value.value
        for member, below in itertools.pairwise(body)
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr)
    }


def _is_made(cls: type) -> bool:
    """A dataclass without a docstring has its signature as one."""
    return bool(cls.__doc__ and cls.__doc__.startswith(f"{cls.__name__}("))


def _own_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, and of those of its bases that are ours, in the order of the source."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("safetrain") and not issubclass(base, enum.Enum):
            for name, member in vars(base).items():
                function = _function_of(member)
                if name[0] != "_" and name not in seen and inspect.isfunction(function) and inspect.getdoc(function):
                    seen.add(name)
                    yield name, member


PROPERTIES = (property, functools.cached_property)


def _function_of(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property) else getattr(member, "__func__", member)


def _item(code: str, doc: str) -> str:
    return f"- `{code}`" + (f": {' '.join(doc.split())}" if doc else "")


def _text(doc: str) -> list[str]:
    """A docstring as Markdown: its examples become blocks that the tests run."""
    lines: list[str] = []
    for paragraph in doc.split("\n\n"):
        if paragraph.lstrip().startswith(">>> "):
            lines += ["```python", *textwrap.dedent(paragraph).splitlines(), "```", ""]
        elif paragraph.startswith("    "):
            lines += ["<!-- drawing -->", "```text", *textwrap.dedent(paragraph).splitlines(), "```", ""]
        elif "\n>>> " in paragraph:
            text, _, example = paragraph.partition("\n>>> ")
            lines += [text, "", "```python", *f">>> {example}".splitlines(), "```", ""]
        else:
            lines += [*paragraph.splitlines(), ""]
    return lines


# ---- commands ------------------------------------------------------------------------------------------------------


def commands() -> str:
    context = click.Context(program, info_name="safetrain")
    parts = []
    for name in COMMANDS:
        command = program.get_command(context, name)  # type: ignore[attr-defined]
        parts += _command(command, f"safetrain {name}", context)
    return "\n".join(parts)


def _command(command: Any, path: str, parent: click.Context) -> list[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    summary, _, rest = inspect.cleandoc(command.help).partition("\n\n\b")
    lines = [f"## {path}", "", *summary.replace("\b\n", "").splitlines(), ""]
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines += [f"`{usage}`", ""]
    for chapter in filter(str.strip, rest.split("\n\n\b")):
        title, _, body = chapter.strip("\n").partition("\n")
        if title != "Examples:":  # those of the pages are run; these are for the terminal
            lines += [" ".join([title, *(f"{line.strip()};" for line in body.splitlines())]).rstrip(";"), ""]
    options = [p for p in command.get_params(context) if isinstance(p, click.Option) and "--help" not in p.opts]
    rows = [record for option in options if (record := option.get_help_record(context))]
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            lines += _command(command.get_command(context, inner), f"{path} {inner}", context)
        return lines
    return [*lines, "| option | |", "|---|---|", *(f"| `{_cell(names)}` | {_cell(text)} |" for names, text in rows), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
