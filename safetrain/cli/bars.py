"""A progress bar on standard error for a command that takes a while; nothing if it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.numbers import of_total
from ..core.progress import shown_by


@contextmanager
def progress_bar(title: str) -> Iterator[None]:
    """Shows what is noted inside. It is gone when the block ends."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, count="")

        def show(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done, total=total, count=of_total(done, total))

        with shown_by(show):
            yield
