"""Reads the records of a run, which are JSON as its standard has it: without NaN and Infinity."""

import json


def strict(text):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def journal(run):
    """Of a result, or of a run directory."""
    path = getattr(run, "run_dir", run) / "journal.jsonl"
    return [strict(line) for line in path.read_text().splitlines()]


def notes(run):
    """The sentences that a run has said to the person who watches it."""
    return [record["text"] for record in journal(run) if record["event"] == "note"]
