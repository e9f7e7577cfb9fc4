"""`safetrain config show|validate|schema`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

from ..core.text import printable, prints_to_terminal
from .flags import config_arguments, load

if TYPE_CHECKING:
    from ..config import LoadedConfig


@click.group()
def command() -> None:
    """Show, check or document a config. Nothing is imported and nothing runs.

    \b
    Examples:
      safetrain config show my.yaml --origin       every value, and where it came from
      safetrain config validate my.yaml            every mistake at once
      safetrain config schema                      every field, and what it does
    """


@command.command()
@config_arguments
@click.option("--origin", is_flag=True, help="Where each value came from, behind it.")
@click.option("--docs", is_flag=True, help="What each field does, above it.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of YAML.")
def show(loaded: LoadedConfig, origin: bool, docs: bool, as_json: bool) -> None:
    """Print the complete config that CONFIG and the overrides amount to; it can be loaded again.

    \b
    Examples:
      safetrain config show quickstart
      safetrain config show my.yaml optimizer.lr=1e-4 --origin --docs
    """
    from ..config.render import to_public_dict, to_yaml

    if as_json and (origin or docs):
        raise click.UsageError("JSON has no comments: --json excludes --origin and --docs")
    if as_json:
        click.echo(json.dumps(_valid_json(to_public_dict(loaded.config)), indent=2, ensure_ascii=False))
    else:
        text = to_yaml(loaded.config, loaded.origins if origin else None, docs)
        click.echo(printable(text) if prints_to_terminal() else text, nl=False)


@command.command()
@config_arguments
def validate(loaded: LoadedConfig) -> None:
    """Check CONFIG and print every problem at once; exit code 2 if there are any.

    \b
    Examples:
      safetrain config validate my.yaml
      safetrain config validate my.yaml loop.precision=bf16
    """
    num_given = sum(origin != "default" for origin in loaded.origins.values())
    click.echo(f"ok: {loaded.source}: {num_given} values given, {len(loaded.origins) - num_given} defaults")


@command.command()
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]...")
@click.option("--json", "as_json", is_flag=True, help="A JSON Schema (draft 2020-12), which editors can use.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def schema(config: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every field with what it accepts, its default and what it does; with CONFIG, also what its targets accept.

    \b
    Examples:
      safetrain config schema
      safetrain config schema my.yaml
      safetrain config schema --json > safetrain.schema.json
    """
    from ..config.describe import json_schema, schema_text

    loaded = None if config is None else load(config, overrides)
    if as_json:
        click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        click.echo(schema_text(None if loaded is None else loaded.config), nl=False)


def _valid_json(value: Any) -> Any:
    """JSON has no numbers for infinity and NaN: they become strings."""
    if isinstance(value, dict):
        return {key: _valid_json(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_valid_json(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
