"""`safetrain lint`: finds patterns in source code that lead to NaN, without running it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from .main import EXIT_CHECK_FAILED

if TYPE_CHECKING:
    from ..lint.files import Report


@click.command()
@click.argument("paths", nargs=-1, metavar="PATH...", type=click.Path())
@click.option("--select", metavar="CODES", help="Only these rules: codes or prefixes, with commas (ST2,ST101).")
@click.option("--ignore", metavar="CODES", help="Not these rules: codes or prefixes, with commas.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@click.option("--rules", is_flag=True, help="List the rules and exit.")
@click.option("-q", "--quiet", is_flag=True, help="One line per finding, without why and the safe form.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of every error.", expose_value=False)
def command(
    paths: tuple[str, ...], select: str | None, ignore: str | None, as_json: bool, rules: bool, quiet: bool
) -> int:
    """Look for patterns that go NaN later, in files and below directories, without running or importing them.

    \b
    Examples:
      safetrain lint train.py models/
      safetrain lint . --select ST1,ST4 --ignore ST404
      safetrain lint . --json
      safetrain lint --rules

    \b
    To accept a finding, end its line with one of
      # noqa: ST201        # safetrain: ignore[ST201]        # safetrain: ignore

    \b
    Exit codes:
      0 nothing found   2 usage   3 something found, or a file that cannot be parsed
    """
    from ..lint import RULES, lint_paths

    codes = _chosen(select, ignore)
    if rules:
        for code in sorted(codes & RULES.keys()):
            click.echo(f"{code}  {RULES[code].title}")
        return 0
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'")
    report = lint_paths(paths, codes)
    if as_json:
        counts = {"schema": 1, "files": report.num_files, "lines": report.num_lines}
        findings = [finding.to_dict() for finding in report.findings]
        click.echo(json.dumps({**counts, "findings": findings}, indent=2))
    else:
        for finding in report.findings:
            click.echo(finding.render().partition("\n")[0] if quiet else finding.render())
        if not quiet:
            click.echo(_summary(report), file=sys.stderr if report.findings else None)
    return EXIT_CHECK_FAILED if report.findings else 0


def _chosen(select: str | None, ignore: str | None) -> set[str]:
    """The codes that remain; a prefix that no code starts with is a mistake."""
    from ..lint import RULES, SYNTAX_ERROR

    every = {*RULES, SYNTAX_ERROR}
    selected, ignored = _matching(select, every, "--select"), _matching(ignore, every, "--ignore")
    return (every if select is None else selected | {SYNTAX_ERROR}) - ignored


def _matching(given: str | None, every: set[str], option: str) -> set[str]:
    found: set[str] = set()
    for prefix in filter(None, (part.strip().upper() for part in (given or "").split(","))):
        matching = {code for code in every if code.startswith(prefix)}
        if not matching:
            raise click.UsageError(f"{option} {prefix}: there is no such rule; 'safetrain lint --rules' lists them")
        found |= matching
    return found


def _summary(report: Report) -> str:
    count, files = len(report.findings), f"{report.num_files} file{'s' if report.num_files != 1 else ''}"
    if not count:
        return f"ok: nothing found in {files}"
    return f"{count} finding{'s' if count != 1 else ''} in {files}; each is explained in docs/lint.md"
