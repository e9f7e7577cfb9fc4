"""Reads the journal of a run."""

import json


def journal(run):
    """Of a result, or of a run directory."""
    path = getattr(run, "run_dir", run) / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
