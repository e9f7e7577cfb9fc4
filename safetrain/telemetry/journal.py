"""`journal.jsonl`: one line per decision, valid JSON whatever the numbers are."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..core.files import sync, to_json
from ..core.incident import Incident
from ..core.result import FitResult
from .sink import Sink, StepRecord

MAX_PENDING = 64 * 2**20


class Stream(Protocol):
    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class JournalFile:
    """Lines at the end of a file. A write that fails (full disk) is tried again with the next line; nothing is torn."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        """A new file, or one whose first `resume_at` bytes stay: what follows was not part of the state resumed from."""
        self._path = path
        self._pending = bytearray()
        self._failing = False
        self._lost = 0
        self.num_missing = 0
        """Bytes that the file should have had and did not."""
        if resume_at is None:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._written = 0
            return
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        self._written = resume_at if size >= resume_at else self._end_of_last_line(size)
        self.num_missing = resume_at - self._written
        os.ftruncate(self._descriptor, self._written)
        os.lseek(self._descriptor, self._written, os.SEEK_SET)

    def _end_of_last_line(self, size: int) -> int:
        return os.pread(self._descriptor, size, 0).rfind(b"\n") + 1

    @property
    def position(self) -> int:
        return self._written + len(self._pending)

    def write(self, text: str) -> None:
        self._pending += text.encode()

    def flush(self) -> None:
        try:
            while self._pending:
                num_written = os.write(self._descriptor, self._pending)
                self._written += num_written
                del self._pending[:num_written]
            self._failing = False
            if self._lost:
                lost, self._lost = self._lost, 0
                self.write(
                    to_json({"event": "note", "text": f"{lost} bytes of the journal could not be written here"}) + "\n"
                )
        except OSError as error:
            if not self._failing:
                self._failing = True
                logging.getLogger("safetrain").warning("the journal cannot be written, which is tried again: %s", error)
            if len(self._pending) > MAX_PENDING:
                self._lost += len(self._pending)
                self._pending.clear()

    def sync(self) -> None:
        """Down to the disk."""
        self.flush()
        sync(self._descriptor)

    @property
    def is_intact(self) -> bool:
        """The file is still where it was made."""
        try:
            return os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino
        except OSError:
            return False

    def begin_again(self) -> None:
        """The file was removed: go on in a new one."""
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._written = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        self.flush()
        os.close(self._descriptor)


class Journal(Sink):
    def __init__(self, stream: Stream, *, close: bool = True) -> None:
        self._stream, self._close = stream, close

    def _write(self, event: str, **fields: Any) -> None:
        self._stream.write(to_json({"event": event, **fields}) + "\n")
        self._stream.flush()

    def started(self, about: Mapping[str, Any]) -> None:
        self._write("start" if about.get("resumed") is None else "resume", **about)

    def noted(self, text: str) -> None:
        self._write("note", text=text)

    def stepped(self, records: Sequence[StepRecord]) -> None:
        self._stream.write("".join(_line(record) for record in records))
        self._stream.flush()

    def incident(self, incident: Incident) -> None:
        self._write("incident", **incident.to_dict())

    def rolled_back(self, to_step: int, num_committed: int, source: str) -> None:
        self._write("rollback", to_step=to_step, committed=num_committed, source=source)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._write("eval", **metrics, best=is_best)

    def hangs(self, about: Mapping[str, Any]) -> None:
        self._write("hang", **about)

    def saving(self, step: int, num_committed: int) -> None:
        # Before the state is gathered, which records the position in the journal: a resume from this checkpoint keeps the line.
        self._write("checkpoint", step=step, committed=num_committed)

    def sync(self) -> None:
        if isinstance(self._stream, JournalFile):
            self._stream.sync()

    def finished(self, result: FitResult) -> None:
        summary = result.summary()
        summary["incidents"] = len(result.incidents)
        self._write("end", **summary)

    def close(self) -> None:
        if self._close:
            self._stream.close()


class JournalLines(Journal):
    """The same lines on standard output."""

    writes_to_output = True


_encode = json.JSONEncoder(allow_nan=False).encode


def _line(record: StepRecord) -> str:
    view, decision = record.view, record.decision
    if _is_plain(record):
        lr, scale = view.lr * decision.lr_scale, decision.lr_scale
        return (
            f'{{"event": "step", "step": {view.step}, "action": "commit", "loss": {view.loss!r}, '
            f'"grad_norm": {view.grad_norm!r}, "lr": {lr!r}, "lr_scale": {scale!r}, "epoch": {view.epoch}, '
            f'"committed": {record.num_committed}}}\n'
        )
    fields = _fields(record)
    try:
        return _encode(fields) + "\n"
    except (TypeError, ValueError):
        # A number of NumPy's, or one that is not finite; looking for them beforehand would triple the cost of a line.
        return to_json(fields) + "\n"


def _is_plain(record: StepRecord) -> bool:
    """It has only the numbers that every step has, all of them finite. True of nearly every step."""
    view = record.view
    return (
        record.is_ordinary
        and type(view.loss) is type(view.grad_norm) is type(view.lr) is type(record.decision.lr_scale) is float
        and math.isfinite(view.loss + view.grad_norm + view.lr)
        and record.decision.is_silent
        and not (view.metrics or view.norm_overflow)
        and len(view.micro_losses) <= 1
        and view.loss_scale == 1.0
    )


def _fields(record: StepRecord) -> dict[str, Any]:
    view = record.view
    fields: dict[str, Any] = {
        "event": "step",
        "step": view.step,
        "action": record.outcome,
        "loss": view.loss,
        "grad_norm": view.grad_norm,
        "lr": view.lr * record.decision.lr_scale,
        "lr_scale": record.decision.lr_scale,
        "epoch": view.epoch,
        "committed": record.num_committed,
    }
    if view.refused_loss is not None:
        fields["refused_loss"] = view.refused_loss
    if view.metrics:
        fields["metrics"] = view.metrics
    if len(view.micro_losses) > 1:
        fields["micro_losses"] = view.micro_losses
    if view.loss_scale != 1.0:
        fields["loss_scale"] = view.loss_scale
    if view.norm_overflow:
        fields["norm_overflow"] = True
    if reasons := record.decision.reasons:
        fields["reasons"] = reasons
    return fields
