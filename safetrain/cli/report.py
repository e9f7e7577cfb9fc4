"""`safetrain report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--compare", metavar="RUN2", type=click.Path(path_type=Path), help="Compare with another run.")
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help="Where to write; default: RUN/report.html."
)
@click.option("--open", "opened", is_flag=True, help="Show it in the browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about what was written.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(run: Path, compare: Path | None, out: Path | None, opened: bool, as_json: bool, quiet: bool) -> int:
    """Write the HTML report of a run.

    One file that needs no network: how the run went, loss, gradient norm and learning rate with everything that happened, and
    for each incident the line, the cause, the operands, the samples, and a fix. Works for a run that is still running, and
    for one that was killed.

    \b
    Examples:
      safetrain report runs/first                              writes runs/first/report.html
      safetrain report runs/first --open                       and shows it
      safetrain report runs/first --compare runs/second        both side by side, in runs/first/comparison.html
      safetrain report runs/first --out report.html

    \b
    Exit codes:
      0 written   2 usage, or no run there
    """
    from ..report import write_report

    written = write_report(run, out, compare)
    if as_json:
        from ..core.files import to_json

        fields = {
            "report": str(written.path),
            "bytes": written.num_bytes,
            "verdicts": [verdict.word for verdict in written.verdicts],
            "incidents": written.num_incidents,
        }
        click.echo(to_json(fields))
    elif not quiet:
        from ..core.text import printable

        for verdict in written.verdicts:
            click.echo(printable(f"{verdict.word}: {verdict.sentence}"))
        click.echo(f"report: {written.path} ({written.num_bytes / 1000:,.0f} kB)")
    if opened and click.launch(written.path.resolve().as_uri()) != 0:
        click.echo(f"no browser could be opened; the report is {written.path}", err=True)
    return 0
