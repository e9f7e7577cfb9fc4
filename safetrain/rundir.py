"""The directory of a run. A new run never writes into an old one."""

from __future__ import annotations

import re
import time
from pathlib import Path

from .errors import RunDirectoryError

CONFIG, JOURNAL, SUMMARY = "config.yaml", "journal.jsonl", "summary.json"


def create_run_dir(asked: str | Path | None, name: str) -> Path:
    """Make the directory asked for, or `runs/<name>-<time>` below the current one."""
    try:
        if asked is not None:
            path = Path(asked)
            path.mkdir(parents=True, exist_ok=True)
            if held := [f for f in (CONFIG, JOURNAL, SUMMARY) if (path / f).exists()]:
                raise RunDirectoryError(
                    f"{path} already holds a run (it has {', '.join(held)}), and a run is never overwritten.\n"
                    "To fix: choose another directory, or leave it out to get a new one below runs/."
                )
            return path
        safe_name = re.sub(r"[^\w.-]+", "_", name).strip("._") or "run"
        first = Path("runs") / f"{safe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path, attempt = first, 1
        while True:
            try:
                path.mkdir(parents=True)
                return path
            except FileExistsError:
                if path.parent.exists() and not path.parent.is_dir():
                    raise
                attempt += 1
                path = first.with_name(f"{first.name}-{attempt}")
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory cannot be made: {error}.\nTo fix: give a directory you can write to (--out or run_dir)."
        ) from error
