"""TensorBoard events in the run directory. NaN is written as it is: TensorBoard marks it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.incident import Incident
from ..core.result import FitResult
from ..incidents.render import markdown
from ..tensors.devices import wide
from .event_file import EventFile
from .scalars import LAYOUT, eval_scalars, hyperparameters, step_scalars
from .sink import ResumePoint, Sink, StepRecord
from .summary import headline, next_commands, summary_rows
from .vitals import Vitals

if TYPE_CHECKING:
    from torch import Tensor

END = ".end"
"""Suffix of the file that holds how the run ended; a resume removes it, because TensorBoard believes the first end it reads."""
NUM_BINS = 64


class TensorBoard(Sink):
    def __init__(
        self, run_dir: Path, settings: Mapping[str, Any], texts: Mapping[str, str], resume: ResumePoint | None = None
    ) -> None:
        """`settings` is the config as nested dictionaries; `texts` are shown as Markdown under their names."""
        from torch.utils.tensorboard import summary  # about a second to import

        self._summary: Any = summary
        self._directory, self._failed = run_dir, False
        self._settings = hyperparameters(settings)
        self._tags: set[str] = set()
        for end in run_dir.glob(f"events.out.tfevents.*{END}"):
            end.unlink(missing_ok=True)
        self._file = EventFile(run_dir)
        if resume is not None:
            self._forget_after(resume.step)
        self._add(self._summary.custom_scalars({name: _charts(charts) for name, charts in LAYOUT.items()}))
        for name, text in texts.items():
            self._add_text(name, text, 0)

    def _write(self, action: Callable[..., None], *arguments: Any) -> None:
        """A full disk costs the curves, not the run."""
        if self._failed:
            return
        try:
            action(*arguments)
        except OSError as error:
            self._failed = True
            logging.getLogger("safetrain").warning("TensorBoard events are no longer written: %s", error)

    def _add(self, content: Any, step: int | None = None) -> None:
        self._write(self._file.add_summary, content, step)

    def _add_text(self, name: str, text: str, step: int | None = None) -> None:
        """Also text that is no UTF-8, as a path can be."""
        self._add(self._summary.text(name, text.encode("utf-8", "backslashreplace").decode()), step)

    def _forget_after(self, step: int) -> None:
        """What is written from there on replaces what an earlier process wrote."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._write(self._file.add, Event(step=step, file_version="brain.Event:2"))
        self._write(self._file.add, Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        """All of a step in one event, which costs a tenth of one each."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._tags.update(values)
        content = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(Summary(value=content), step)

    # ---- what is received ------------------------------------------------------------------------------------------

    def started(self, about: Mapping[str, Any]) -> None:
        metrics = {"run/final_loss": 0, "run/best_loss": 0, "run/steps": 0, "run/incidents": 0}
        experiment, start, _ = self._summary.hparams(self._settings, metrics)
        self._add(experiment)
        self._add(start)

    def logged(self, record: StepRecord, vitals: Vitals) -> None:
        self._scalars(step_scalars(record, vitals), record.view.step)

    def incident(self, incident: Incident) -> None:
        self._add_text("health/incidents", markdown(incident), incident.step)

    def noted(self, text: str) -> None:
        self._add_text("health/notes", text.replace("<", "&lt;"))

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._scalars(eval_scalars(metrics), int(metrics["step"]))

    def tensors(self, values: Mapping[str, Tensor], step: int) -> None:
        for name, tensor in values.items():
            num_bad = self._histogram(name, tensor, step)
            tag = f"precision/nonfinite_{name.removeprefix('tensors/')}"
            if num_bad or tag in self._tags:
                self._scalars({tag: num_bad}, step)

    def _histogram(self, name: str, tensor: Tensor, step: int) -> int:
        """Of the finite part; returns how many values are not."""
        import torch

        values = tensor.detach().float().flatten()
        finite = values[torch.isfinite(values)]
        if finite.numel():
            low, high = (float(bound) for bound in torch.aminmax(finite))
            high = high if high > low else low + max(abs(low), 1.0) * 1e-6
            width = (high - low) / NUM_BINS
            counts = torch.histc(finite, NUM_BINS, low, high).tolist()
            limits = [low + width * (index + 1) for index in range(NUM_BINS)]
            widened = wide(finite)
            sums = float(widened.sum()), float(widened.square().sum())
            self._add(self._summary.histogram_raw(name, low, high, finite.numel(), *sums, limits, counts), step)
        return values.numel() - finite.numel()

    def image(self, tag: str, pixels: Tensor, step: int) -> None:
        self._add(self._summary.image(tag, pixels, dataformats="CHW"), step)

    def finished(self, result: FitResult) -> None:
        final: dict[str, float] = {"run/steps": result.steps, "run/incidents": len(result.incidents)}
        final["run/final_loss"] = result.final_loss
        if result.best is not None:
            final |= {f"run/best_{name}": v for name, v in result.best.items() if name != "step"}
        self._scalars(final, result.attempted)
        self._add_text("health/summary", _summary_text(result), result.attempted)
        if not self._failed and (status := _session_status(result.status)) is not None:
            self._write(self._write_end, status)

    def close(self) -> None:
        self._file.close()

    def _write_end(self, status: Any) -> None:
        end = EventFile(self._directory, END)
        end.add_summary(status)
        end.close()


def _charts(charts: Mapping[str, list[str]]) -> dict[str, list[Any]]:
    return {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in charts.items()}


def fenced(text: str, language: str = "") -> str:
    """Markdown that shows the text as it is."""
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def table(facts: Mapping[str, Any]) -> str:
    """Markdown of two columns."""
    cells = {name: ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact) for name, fact in facts.items()}
    rows = "\n".join(f"| {name} | {cell.replace('|', '/')} |" for name, cell in cells.items())
    return f"| | |\n|---|---|\n{rows}"


def _session_status(status: str) -> Any:
    """How the run ended, for the table of hyperparameters. One that will be resumed has not ended."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    ends = {"done": "STATUS_SUCCESS", "stopped": "STATUS_FAILURE", "error": "STATUS_FAILURE"}
    if status not in ends:
        return None
    content = HParamsPluginData(
        session_end_info=SessionEndInfo(status=Status.Value(ends[status])), version=PLUGIN_DATA_VERSION
    )
    data = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content.SerializeToString())
    return Summary(value=[Summary.Value(tag=SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=data))])


def _summary_text(result: FitResult) -> str:
    rows = [*summary_rows(result), *(("next", f"`{command}`: {purpose}") for command, purpose in next_commands(result))]
    lines = "\n".join(f"| {label} | {text.strip().replace('|', '/')} |" for label, text in rows)
    return f"**{headline(result)}**\n\n| | |\n|---|---|\n{lines}"
