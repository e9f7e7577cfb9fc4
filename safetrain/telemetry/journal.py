"""`journal.jsonl`: one line per decision, flushed line by line, valid JSON whatever the numbers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from ..files import to_json
from ..incident import Incident
from ..result import FitResult
from .sink import Sink, StepRecord


class Journal(Sink):
    def __init__(self, stream: TextIO, *, close: bool = True) -> None:
        self._stream, self._close = stream, close

    def _write(self, event: str, **fields: Any) -> None:
        self._stream.write(to_json({"event": event, **fields}) + "\n")
        self._stream.flush()

    def started(self, about: Mapping[str, object]) -> None:
        self._write("start", **about)

    def stepped(self, record: StepRecord) -> None:
        view = record.view
        fields: dict[str, Any] = {
            "step": view.step,
            "action": record.outcome,
            "loss": view.loss,
            "grad_norm": view.grad_norm,
            "lr": view.lr * record.decision.lr_scale,
            "lr_scale": record.decision.lr_scale,
            "epoch": record.epoch,
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
        self._write("step", **fields)

    def incident(self, incident: Incident) -> None:
        self._write("incident", **incident.to_dict())

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._write("eval", **metrics, best=is_best)

    def finished(self, result: FitResult) -> None:
        summary = result.summary()
        summary["incidents"] = len(result.incidents)
        self._write("end", **summary)
        if self._close:
            self._stream.close()
