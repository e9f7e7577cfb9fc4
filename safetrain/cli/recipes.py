"""`safetrain recipes ls|cp`: what ships with safetrain, and a copy of it to work on."""

from __future__ import annotations

import ast
import difflib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ..config.sources import EXTENDS, bundled_dir, recipe_names
from ..errors import UsageError

FACTS = ("data", "scales", "time", "reaches", "breaks")
_FACT = re.compile(rf"#   ({'|'.join(FACTS)}) +(\S.*)")
_FILE_TARGET = re.compile(r"(_target_:\s*)\.\./recipes/([\w./-]+\.py)(?=:)")
_REACHES = re.compile(r"(\w+) (>=|<=) (\S+)")


@dataclass(frozen=True)
class Recipe:
    """What the comment at the top of a recipe's config says."""

    name: str
    what: str
    data: str = ""
    """Where the samples come from when nothing is changed."""
    scales: str = ""
    """What it can be pointed at instead."""
    time: str = ""
    """For the whole run, on one CPU core."""
    reaches: str = ""
    """The evaluation metric at its best: `accuracy >= 0.98`."""
    breaks: str = ""
    """The recipe that this one is a broken copy of."""

    def goal(self) -> tuple[str, str, float]:
        """The metric, `>=` or `<=`, and the number."""
        found = _REACHES.fullmatch(self.reaches)
        if found is None:
            raise UsageError(
                f"the header of {self.name}.yaml does not say what it reaches.\n"
                "To fix: add a line like '#   reaches  accuracy >= 0.98'."
            )
        return found[1], found[2], float(found[3])


def read_recipe(name: str) -> Recipe:
    """The recipe of this name. Its header is a sentence or two, an empty line, and the facts, one per line."""
    header: list[str] = []
    for line in _config_path(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        header.append(line)
    end = header.index("#") if "#" in header else len(header)
    what = " ".join(line.removeprefix("#").strip() for line in header[:end])
    facts = {found[1]: found[2] for line in header if (found := _FACT.fullmatch(line))}
    return Recipe(name, what, **facts)


def all_recipes() -> list[Recipe]:
    return [read_recipe(name) for name in recipe_names()]


def _config_path(name: str) -> Path:
    if name not in recipe_names():
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(recipe_names())}."
        raise UsageError(f"there is no recipe {name!r}.\nTo fix: {hint}")
    return bundled_dir() / "configs" / f"{name}.yaml"


# ---- commands -------------------------------------------------------------------------------------------------------


@click.group()
def command() -> None:
    """List the recipes that ship with safetrain, or copy one to work on.

    \b
    Examples:
      safetrain recipes ls
      safetrain recipes cp vae my_vae        then: cd my_vae && safetrain fit vae.yaml
    """


@command.command()
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def ls(as_json: bool) -> None:
    """List the recipes: what each does, on which data, how long it takes, and what it reaches.

    \b
    Examples:
      safetrain recipes ls
      safetrain recipes ls --json
    """
    recipes = all_recipes()
    if as_json:
        click.echo(json.dumps([asdict(recipe) for recipe in recipes], indent=2, ensure_ascii=False))
        return
    for recipe in recipes:
        if not recipe.breaks:
            click.echo(f"{recipe.name:<24}{recipe.time:>5}   {recipe.reaches}")
            click.echo(_indented(_first_sentence(recipe.what)))
            click.echo(_indented(f"data: {recipe.data}"))
    click.echo("\nWith a fault, to see what happens:\n")
    for recipe in recipes:
        if recipe.breaks:
            click.echo(f"{recipe.name}\n{_indented(recipe.what)}")
    click.echo("\nTrain one: safetrain fit NAME     Copy one to work on: safetrain recipes cp NAME")


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.?]) ", text, maxsplit=1)[0]


def _indented(text: str) -> str:
    width = shutil.get_terminal_size((120, 24)).columns
    return click.wrap_text(text, width, "    ", "    ")


@command.command()
@click.argument("name")
@click.argument("dest", required=False, type=click.Path(file_okay=False, path_type=Path))
def cp(name: str, dest: Path | None) -> None:
    """Copy the recipe NAME, its config and all the source and data it needs, into DEST (by default a directory NAME here).

    Nothing is ever overwritten. The copy runs from anywhere and does not depend on the original.

    \b
    Examples:
      safetrain recipes cp image
      safetrain recipes cp image projects/flowers
    """
    dest = Path(name.replace("/", "_")) if dest is None else dest
    files = copies(name)
    if existing := [path for path in files if (dest / path).exists()]:
        raise UsageError(
            f"{dest} already holds {', '.join(map(str, existing))}, and nothing is overwritten.\n"
            "To fix: give another directory, or move these away."
        )
    try:
        for path, contents in files.items():
            (dest / path).parent.mkdir(parents=True, exist_ok=True)
            (dest / path).write_bytes(contents)
    except OSError as error:
        raise UsageError(f"{error}.\nTo fix: give a directory you can write to.") from error
    for path in files:
        click.echo(f"  {dest / path}")
    click.echo(f"train it: safetrain fit {dest / name}.yaml")


def copies(name: str) -> dict[Path, bytes]:
    """What a copy of a recipe consists of: contents by path below the destination."""
    recipes = bundled_dir() / "recipes"
    texts: dict[str, str] = {}
    _collect_configs(name, texts)
    sources: dict[Path, bytes] = {}
    for text in texts.values():
        for found in _FILE_TARGET.finditer(text):
            _collect_source(recipes / found[2], sources)
    files = {Path(f"{config}.yaml"): _standing_alone(text, list(texts)).encode() for config, text in texts.items()}
    return {**files, **{path.relative_to(recipes): contents for path, contents in sources.items()}}


def _collect_configs(name: str, texts: dict[str, str]) -> None:
    """The config and those it extends."""
    import yaml

    if name in texts:
        return
    texts[name] = _config_path(name).read_text(encoding="utf-8")
    extends: Any = yaml.safe_load(texts[name]).get(EXTENDS) or []
    for parent in [extends] if isinstance(extends, str) else extends:
        _collect_configs(str(parent).removesuffix(".yaml"), texts)


def _collect_source(path: Path, sources: dict[Path, bytes]) -> None:
    """A source file, and the files next to it that it imports or names in a string."""
    if path in sources:
        return
    sources[path] = path.read_bytes()
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(sources[path])):
        names: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w-]+\.\w+", node.value):
            names = [node.value]
        elif isinstance(node, ast.Import):
            names = [f"{alias.name}.py" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.py"]
        for name in names:
            if (path.parent / name).is_file():
                _collect_source(path.parent / name, sources)


def _standing_alone(text: str, names: list[str]) -> str:
    """A config as it reads next to its sources; the commands in its header name the file, not the recipe that ships."""
    text = _FILE_TARGET.sub(r"\1./\2", text)
    for name in names:
        text = re.sub(rf"(safetrain (?:fit|config show) {re.escape(name)})(?=\s|$)", r"\1.yaml", text)
    return text
