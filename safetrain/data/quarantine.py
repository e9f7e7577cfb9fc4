"""Samples that keep causing incidents, counted by their index in the data set and left out of later epochs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.files import to_json, write_text

QUARANTINE = "quarantine.jsonl"


class Quarantine:
    """Counts incidents per sample; the data stream excludes the samples. Saved with the run, never rewound by a rollback."""

    def __init__(self, after: int | None, directory: Path | None) -> None:
        """A sample is quarantined after `after` incidents; None: never. The list is written to `directory`, if given."""
        self._after, self._directory = after, directory
        self._counts: Counter[int] = Counter()
        self._records: list[dict[str, Any]] = []

    @property
    def ids(self) -> list[int]:
        """In the order in which they were quarantined."""
        return [record["id"] for record in self._records]

    def note(self, ids: Sequence[int], step: int, epoch: int, reason: str) -> list[str]:
        """Count one more incident of these samples; returns a message for each."""
        if self._after is None:
            return []
        messages = []
        for index in ids:
            self._counts[index] += 1
            count = self._counts[index]
            if count == self._after:
                self._records.append({"id": index, "step": step, "epoch": epoch, "count": count, "reason": reason})
                messages.append(
                    f"sample {index} of the data set has caused {count} incidents: it is left out of later epochs"
                )
            else:
                messages.append(f"sample {index} of the data set has caused {count} of {self._after} incidents")
        self._write()
        return messages

    @property
    def is_on(self) -> bool:
        return self._after is not None

    def add(self, sample: int, step: int, epoch: int, reason: str) -> None:
        """Without counting: the sample cannot be read at all."""
        self._records.append({"id": sample, "step": step, "epoch": epoch, "count": 1, "reason": reason})
        self._write()

    def _write(self) -> None:
        if self._directory is None or not self._records:
            return
        try:
            write_text(self._directory / QUARANTINE, "".join(to_json(record) + "\n" for record in self._records))
        except OSError as error:  # a full disk must not end the run; the list is part of the saved state too
            logging.getLogger("safetrain").warning("%s could not be written: %s", QUARANTINE, error)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": [list(item) for item in self._counts.items()], "records": [dict(r) for r in self._records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Samples quarantined after that state was saved are released, and the file is rewritten."""
        self._counts = Counter(dict(state["counts"]))
        self._records = [dict(record) for record in state["records"]]
        if self._directory is not None and not self._records:
            (self._directory / QUARANTINE).unlink(missing_ok=True)
        self._write()
