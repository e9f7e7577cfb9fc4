"""`safetrain simulate`: what the guards would have suspected on an existing run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..report.simulation import Simulation

MAX_LISTED = 40


@click.command()
@click.argument("curve", metavar="CURVE", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[guards.KEY=VALUE | ~guards.NAME]...")
@click.option(
    "--plot", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Draw it: .png, .svg, .pdf."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: steps, suspects, rollback_suspects, clips."
)
@click.option("-q", "--quiet", is_flag=True, help="Only the counts.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(curve: Path, overrides: tuple[str, ...], plot: Path | None, as_json: bool, quiet: bool) -> int:
    """Judge each step of a run that exists, from any trainer, by the guards of this config, and list what they suspect.

    CURVE is a CSV with a header that has `loss` and, if known, `step`, `grad_norm` and `lr`, one line per step (wandb's export is
    one); the directory of a run; or TensorBoard's event files. In a run, each suspect is tried before anything is refused; here
    the curve goes on as it was.

    \b
    Examples:
      safetrain simulate losses.csv
      safetrain simulate runs/first guards.spike.z=4 --plot first.png
      safetrain simulate logs/events.out.tfevents.1700000000.host --json

    \b
    Exit codes:
      0 simulated, whatever was found   2 usage, or no losses there
    """
    from ..config import load_config
    from ..core.files import to_json
    from ..report.curve import read_curve
    from ..report.simulation import draw, simulate

    config = load_config(None, overrides)
    simulation = simulate(read_curve(curve), config.active_guards)
    if plot is not None:
        draw(simulation, plot, curve.name)
    if as_json:
        click.echo(to_json(simulation.to_plain()))
        return 0
    from ..core.text import printable

    click.echo(printable("\n".join(_table(simulation, curve, quiet))))
    if plot is not None:
        click.echo(f"plot: {plot}")
    return 0


def _table(simulation: Simulation, curve: Path, quiet: bool) -> list[str]:
    counts = {name: value if isinstance(value, int) else len(value) for name, value in simulation.to_plain().items()}
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    lines = [f"{curve.name}: {said}"]
    if quiet:
        return lines
    if simulation.found:
        lines += ["", *_plot(simulation), "", "    step  guard     why"]
    for suspect in simulation.found[:MAX_LISTED]:
        lines.append(f"{suspect.step:8}  {suspect.guard:<8}  {suspect.reason}")
    if len(simulation.found) > MAX_LISTED:
        lines.append(f"          … and {len(simulation.found) - MAX_LISTED} more: --json lists them all")
    if simulation.clips:
        lines.append(
            f"clipped: {', '.join(map(str, simulation.clips[:20]))}{' …' if len(simulation.clips) > 20 else ''}"
        )
    return lines


def _plot(simulation: Simulation, width: int = 80, height: int = 8) -> list[str]:
    """The curve by step, the largest loss of each column; below it, where something was suspected."""
    points = simulation.points
    columns = min(width, len(points))
    column = {point.step: index * columns // len(points) for index, point in enumerate(points)}
    peaks = [-float("inf")] * columns
    for point in points:
        if point.loss - point.loss == 0.0:
            peaks[column[point.step]] = max(peaks[column[point.step]], point.loss)
    shown = sorted(peak for peak in peaks if peak - peak == 0.0)
    if not shown:
        return []
    low, high = shown[0], shown[int(0.95 * (len(shown) - 1))]
    rows = [min(height - 1, int((peak - low) / (high - low or 1.0) * height)) if peak >= low else -1 for peak in peaks]
    drawn = ["".join("█" if row >= level else " " for row in rows).rstrip() for level in range(height - 1, -1, -1)]
    marks = [" "] * columns
    for suspect in simulation.found:
        marks[column[suspect.step]] = "R" if suspect.guard == "rollback" else "^"
    labels = [f"{high:9.4g} ", *[" " * 10] * (height - 2), f"{low:9.4g} "]
    legend = "^ suspect, R rollback suspect"
    lines = [label + row for label, row in zip(labels, drawn, strict=True)]
    return [*lines, " " * 10 + "".join(marks).rstrip(), " " * 10 + legend]
