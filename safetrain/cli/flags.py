"""Arguments that several commands share: a config, overrides, and flags that are short for overrides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ..config import LoadedConfig, Override

Command = TypeVar("Command", bound=Callable[..., Any])


def config_arguments(function: Command) -> Command:
    """CONFIG, overrides, and the flags that change the config; the command receives `loaded`, the loaded config."""

    @functools.wraps(function)
    def command(config: str, overrides: tuple[str, ...], **options: Any) -> Any:
        flags = {name: options.pop(name) for name in ("seed", "device", "precision", "fast_dev_run")}
        console = "json" if options.get("json_lines") else "off" if options.get("quiet") else None
        return function(load(config, overrides, console=console, **flags), **options)

    decorators = [
        click.argument("config"),
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE | ~KEY]..."),
        click.option("--seed", metavar="N", help="Seed of every random source."),
        click.option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps, …"),
        click.option("--precision", metavar="fp32|bf16|fp16", help="Arithmetic of the forward pass."),
        click.option("--fast-dev-run", is_flag=True, help="Only five steps, each of them logged."),
        click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False),
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command  # type: ignore[return-value]


def load(config: str, overrides: tuple[str, ...], **flags: Any) -> LoadedConfig:
    """The config with flags and overrides applied; an explicit `key=value` wins over a flag."""
    from ..config import load as load_with_origins
    from ..config.load import printing

    console = flags.pop("console", None)
    loaded = load_with_origins(config, [*flag_overrides(**flags), *overrides])
    if console is not None and not any(override.startswith("logging.console=") for override in overrides):
        printing(loaded.config, console)
    return loaded


def flag_overrides(
    seed: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    fast_dev_run: bool = False,
) -> list[Override]:
    from ..config import Override

    given = ("--seed", "seed", seed), ("--device", "loop.device", device), ("--precision", "loop.precision", precision)
    changes = [
        Override(key, value, text=f"{flag} {value}", origin=flag) for flag, key, value in given if value is not None
    ]
    if fast_dev_run:
        shortened = {"loop.max_steps": 5, "loop.max_epochs": None, "loop.log_every": 1}
        changes += [Override(key, value, origin="--fast-dev-run") for key, value in shortened.items()]
    return changes
