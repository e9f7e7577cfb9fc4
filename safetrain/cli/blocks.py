"""Incidents in a terminal: with colours there, without control codes elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..core.incident import Incident

_LABEL = re.compile(r"^(  )([A-Z][A-Z ]+?)(?=  |$)")


def show(incident: Incident, title: str, style: str = "red", before: Iterable[str] = ()) -> None:
    """A title, further paragraphs, and the answers to the five questions."""
    from ..incidents.render import answers

    say(title, style)
    for line in (*before, *answers(incident)):
        if line.lstrip().startswith("> "):
            echo(click.style(line, bold=True))
        else:
            echo(_LABEL.sub(lambda found: found[1] + click.style(found[2], fg="cyan"), line))


def say(text: str, style: str | None = None) -> None:
    from ..core.text import printable

    echo(click.style(printable(text), fg=style, bold=style is not None))


def echo(text: str) -> None:
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)
