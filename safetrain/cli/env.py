"""`safetrain env`: versions, devices and features, for a bug report."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import click

WIDTH = 120


@click.command()
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def command(as_json: bool) -> None:
    """Print versions and devices, and which undocumented features of torch and others work here, for a bug report.

    \b
    Environment:
      SAFETRAIN_WITHOUT=NAME,…  turns features off by name, here and in every other command

    \b
    Examples:
      safetrain env
      SAFETRAIN_WITHOUT=foreach safetrain env
    """
    from ..telemetry.environment import environment, undocumented

    facts, features = environment(), undocumented()
    if as_json:
        click.echo(json.dumps({**facts, "undocumented": features}, indent=2))
        return
    width = max(map(len, facts))
    for name, fact in facts.items():
        click.echo(f"{name:<{width}}  {', '.join(fact) if isinstance(fact, list) else fact}")
    click.echo(
        "\nUndocumented features of torch, glibc and others that are relied on, and what is lost where one is missing:\n"
    )
    width = max(map(len, features), default=0)
    for name, feature in features.items():
        click.echo(_lines(f"{name:<{width}}  {'ok' if feature['works'] else 'MISSING':<7}  ", feature))


def _lines(head: str, feature: dict[str, Any]) -> str:
    texts = [feature["lost"]]
    if not feature["works"]:
        texts += [f"instead: {feature['instead']}", f"relies on: {feature['relies_on']}", f"why: {feature['failure']}"]
    blank = " " * len(head)
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=blank if index else head, subsequent_indent=blank)
        for index, text in enumerate(texts)
    )
