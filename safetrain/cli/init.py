"""`safetrain init`: a project to start from."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import click

from ..errors import UsageError

SUFFIX = ".template"
"""Keeps the templates from being taken for modules of this package."""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(directory: Path) -> None:
    """Create a project in DIR: a model, data, a config and a smoke test, which train and pass as they are.

    Nothing is overwritten: if one of the files is there already, none is written.

    \b
    Examples:
      safetrain init my_project
      safetrain init .
    """
    for path in create(directory):
        click.echo(f"created {path}")
    inside = "" if directory.resolve() == Path.cwd() else f"  cd {directory}\n"
    click.echo(
        f"\nNext:\n{inside}"
        "  safetrain fit config.yaml        train it\n"
        "  pytest                           run the smoke test\n"
        "  safetrain explain config.yaml    see the loop with its guards\n"
        "Then edit model.py and data.py; `# Edit` marks the places."
    )


def create(directory: Path) -> list[Path]:
    """Write the project's files; raises before the first one if any is in the way."""
    texts = templates()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file.\nTo fix: name a directory, new or existing.")
    taken = [name for name in texts if (directory / name).exists()]
    if taken:
        raise UsageError(
            f"{directory} already has {', '.join(taken)}; nothing was written.\nTo fix: choose another directory, or move them away."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with open(directory / name, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(
            f"cannot write to {directory}: {error}.\nTo fix: choose a directory you may write to."
        ) from None
    return [directory / name for name in texts]


def templates() -> dict[str, str]:
    """The text of each file by its name."""
    directory = importlib.resources.files("safetrain") / "scaffold"
    found = {
        item.name.removesuffix(SUFFIX): item.read_text(encoding="utf-8")
        for item in directory.iterdir()
        if item.name.endswith(SUFFIX)
    }
    return dict(sorted(found.items()))
