"""TensorBoard scalars. NaN is written as it is: TensorBoard marks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..incident import Incident
from ..result import FitResult
from .sink import Sink, StepRecord


class TensorBoard(Sink):
    def __init__(self, run_dir: Path, log_every: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # about a second to import

        self._writer = SummaryWriter(str(run_dir))
        self._log_every = log_every
        self._num_skipped = 0

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

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
        self._writer.add_text("health/incidents", f"```\n{incident.render()}\n```", incident.step)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        step = int(metrics["step"])
        values = {("loss/eval" if k == "loss" else f"metric/eval_{k}"): v for k, v in metrics.items() if k != "step"}
        self._scalars(values, step)

    def finished(self, result: FitResult) -> None:
        self._writer.close()
