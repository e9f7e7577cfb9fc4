"""`safetrain env`: what a bug report needs."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
def command(as_json: bool) -> None:
    """Print versions and devices, for a bug report.

    \b
    Examples:
      safetrain env
      safetrain env --json
    """
    from ..telemetry.environment import environment

    facts = environment()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, fact in facts.items():
        click.echo(f"{name:<{width}}  {', '.join(fact) if isinstance(fact, list) else fact}")
