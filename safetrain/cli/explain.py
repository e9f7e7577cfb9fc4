"""`safetrain explain`: the loop as a drawing, with the guards of a config plugged into it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..core.text import printable
from .flags import config_arguments

if TYPE_CHECKING:
    from ..config import Config, LoadedConfig
    from ..guards import Guard

# What a guard does by defining a method, by the stage of the loop at which the method is called.
STAGES = {
    "begin": {"attach": "installs its hooks on the model, once", "begin": "prepares for the step"},
    "forward/backward": {"explains": "turns an exception that it can explain into a refused step"},
    "measure": {"limits": "bounds the gradient", "measure": "adds its own numbers to the step's one transfer"},
    "judge": {"judge": "gives a verdict"},
    "learn": {"learn": "updates its baseline"},
}


@click.command()
@config_arguments
def command(loaded: LoadedConfig) -> None:
    """Print the loop of CONFIG with its guards plugged in. Nothing is imported and nothing runs.

    \b
    Examples:
      safetrain explain quickstart
      safetrain explain my.yaml ~guards.clip
    """
    click.echo(printable("\n".join([*_loop(loaded.config), "", *_guards(loaded)])))


def _loop(config: Config) -> list[str]:
    loop, data = config.loop, config.data
    batch = f"{loop.grad_accum} micro-batches" if loop.grad_accum > 1 else "one batch"
    order = "in a new order each epoch" if data.shuffle else "in order"
    backend = f" by {loop.compile}" if isinstance(loop.compile, str) else ""
    compiled = "" if loop.compile is False else f", compiled{backend}"
    deferred = f", every {loop.host_read_every} steps" if loop.host_read_every > 1 else ""
    ema = "" if loop.ema is None else f"; moving average of the weights, decay {loop.ema:g}"
    span = "a run" if config.recovery.budget_steps is None else f"{config.recovery.budget_steps:,} steps"
    stages = {
        "begin": ["remember random state and buffers"],
        "data": [f"{_target(data.train)}: {batch} of {data.batch_size}, {order}"],
        "forward/backward": [f"{_target(config.model)} in {loop.precision}{compiled}; loss: {_target(config.loss)}"],
        "measure": ["loss and gradient norm, on the device; one transfer to the host" + deferred],
        "judge": ["the most severe verdict wins: commit < skip < rollback < stop"],
        "commit": [f"{_optimizer(config)}; schedule: {_target(config.scheduler, 'constant')}{ema}"],
        "learn": ["from committed steps only"],
    }
    for stage, lines in stages.items():
        lines += _guards_at(config, stage)
    head = f"{config.name}: {_length(config)} on {loop.device}, {_evaluation(config)}, seed {config.seed}"
    drawing = [head, ""]
    for stage in ("begin", "data", "forward/backward", "measure", "judge"):
        drawing += [*_drawn(stage, stages[stage], "│ "), "│"]
    drawing += [
        "├─ refused: nothing moved; buffers as they were before the step, gradients cleared, an incident is written",
        f"│           at most {config.recovery.max_refusals} times in {span}, then it stops",
        "│",
    ]
    return [*drawing, *_drawn("commit", stages["commit"], "│ "), "│", *_drawn("learn", stages["learn"], "  ")]


def _drawn(stage: str, lines: list[str], below: str) -> list[str]:
    width = len("forward/backward")
    first, *rest = lines
    return [f"● {stage:<{width}}  {first}", *(f"{below}{'':<{width}}  {line}" for line in rest)]


def _length(config: Config) -> str:
    limits = [("step", config.loop.max_steps), ("epoch", config.loop.max_epochs)]
    given = [f"{count} {unit}{'s' if count > 1 else ''}" for unit, count in limits if count is not None]
    return " or ".join(given) or "1 epoch"


def _evaluation(config: Config) -> str:
    if config.data.eval is None:
        return "no evaluation"
    every = config.loop.eval_every
    return f"evaluated every {every} steps" if every else "evaluated after each epoch"


def _optimizer(config: Config) -> str:
    from ..optim.build import asks_for_fused

    return _target(config.optimizer) + (" (fused)" if asks_for_fused(config.optimizer) else "")


def _target(node: Mapping[str, Any] | None, missing: str = "given in Python") -> str:
    if node is None:
        return missing
    name = node["_target_"].replace(":", ".").rpartition(".")[2]
    arguments = ", ".join(f"{key}={_argument(value)}" for key, value in node.items() if key != "_target_")
    return f"{name}({arguments})"


def _argument(value: Any) -> str:
    return _target(value) if isinstance(value, Mapping) and "_target_" in value else repr(value)


# --- guards ------------------------------------------------------------------------------------------------------


def _active(config: Config) -> dict[str, type[Guard] | None]:
    """The class of every guard that is on; None for one from outside, which would have to be imported."""
    from ..guards import REGISTRY

    on = config.active_guards
    return {name: None if isinstance(options, Mapping) else REGISTRY[name] for name, options in on.items()}


def _guards_at(config: Config, stage: str) -> list[str]:
    from ..guards import Guard

    lines = []
    for name, cls in _active(config).items():
        if cls is not None:
            defined = STAGES.get(stage, {}).items()
            lines += [
                f"· {name} {does}" for method, does in defined if getattr(cls, method) is not getattr(Guard, method)
            ]
    return lines


def _guards(loaded: LoadedConfig) -> list[str]:
    config = loaded.config
    active = _active(config)
    width = max(map(len, [*active, *config.guards, ""]))
    lines = ["guards that are on" if active else "no guard is on"]
    for name, cls in active.items():
        if cls is None:
            node = config.guards[name]
            lines.append(f"  {name:<{width}}  {node['_target_']}, an outside guard: {_target(node)}")
        else:
            lines.append(f"  {name:<{width}}  {_purpose(cls)}{_changed(config.guards[name])}")
    off = {name: loaded.origins.get(f"guards.{name}", "default") for name in config.guards if name not in active}
    if off:
        lines.append("guards that are off")
        lines += [f"  {name:<{width}}  turned off by {origin}" for name, origin in off.items()]
    return lines


def _purpose(cls: type[Guard]) -> str:
    doc = inspect.getdoc(inspect.getmodule(cls)) or cls.__doc__ or ""
    return doc.strip().splitlines()[0] if doc.strip() else cls.__name__


def _changed(options: Any) -> str:
    """The options that differ from their defaults."""
    default = type(options)()
    names = [field.name for field in dataclasses.fields(options)]
    changed = [(name, getattr(options, name), getattr(default, name)) for name in names]
    text = ", ".join(f"{name}={value!r} (default {before!r})" for name, value, before in changed if value != before)
    return f" With {text}" if text else ""
