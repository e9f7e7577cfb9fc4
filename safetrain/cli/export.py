"""`safetrain export`: the weights of a run as one file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--which",
    type=click.Choice(["best", "last", "ema"]),
    help="Of the best evaluation, of the newest checkpoint, or its moving average. Default: best if there is one, else last.",
)
@click.option("--force", is_flag=True, help="Replace OUT if there is such a file.")
def command(run: Path, out: Path, which: str | None, force: bool) -> None:
    """Write the weights of the run in directory RUN to OUT, a safetensors file.

    The checkpoint is verified first, and the file is written whole or not at all. It loads without safetrain:

    \b
      model.load_state_dict(safetensors.torch.load_file("OUT"))

    \b
    Examples:
      safetrain export runs/first model.safetensors
      safetrain export runs/first model.safetensors --which ema
    """
    from ..checkpoint.export import export_weights

    if out.exists() and not force:
        raise click.UsageError(f"{out} exists. To fix: give another name, or replace it with --force")
    exported = export_weights(run, out, which)
    click.echo(
        f"{out}: {exported.which} weights of {exported.checkpoint}, {exported.num_tensors} tensors, {exported.num_bytes:,} bytes"
    )
