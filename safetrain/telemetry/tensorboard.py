"""TensorBoard scalars. NaN is written as it is: TensorBoard marks it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..incident import Incident
from ..result import FitResult
from .sink import ResumePoint, Sink, StepRecord


class TensorBoard(Sink):
    def __init__(self, run_dir: Path, log_every: int, resume: ResumePoint | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # about a second to import

        self._writer = SummaryWriter(str(run_dir), purge_step=None if resume is None else resume.step)
        self._log_every = log_every
        self._num_skipped = 0 if resume is None else resume.num_skipped
        self._failed = False

    def _write(self, method: str, *arguments: Any) -> None:
        """A full disk costs the curves, not the run."""
        if self._failed:
            return
        try:
            getattr(self._writer, method)(*arguments)
        except OSError as error:
            self._failed = True
            logging.getLogger("safetrain").warning("TensorBoard events are no longer written: %s", error)

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._write("add_scalar", tag, value, step)

    def stepped(self, record: StepRecord) -> None:
        view = record.view
        self._num_skipped += record.outcome != "commit"
        if record.outcome == "commit" and view.refused_loss is None and view.step % self._log_every:
            return
        values = {
            "health/grad_norm": view.grad_norm,
            "health/lr_scale": record.decision.lr_scale,
            "health/skipped": self._num_skipped,
            "loss/train": view.loss if view.refused_loss is None else view.refused_loss,
            "optim/lr": view.lr * record.decision.lr_scale,
        }
        if view.loss_scale != 1.0:
            values["precision/loss_scale"] = view.loss_scale
        self._scalars(values | {f"metric/{name}": value for name, value in view.metrics.items()}, view.step)

    def incident(self, incident: Incident) -> None:
        self._write("add_text", "health/incidents", f"```\n{incident.render()}\n```", incident.step)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        step = int(metrics["step"])
        values = {("loss/eval" if k == "loss" else f"metric/eval_{k}"): v for k, v in metrics.items() if k != "step"}
        self._scalars(values, step)

    def sync(self) -> None:
        self._write("flush")

    def finished(self, result: FitResult) -> None:
        self._write("close")
