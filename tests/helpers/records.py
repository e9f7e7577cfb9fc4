"""What a run has written down."""

import json


def journal(result):
    return [json.loads(line) for line in (result.run_dir / "journal.jsonl").read_text().splitlines()]
