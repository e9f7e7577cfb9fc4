"""Losses, gradient norms and learning rates by step of an existing run, from the logs of any trainer."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.rundir import JOURNAL
from ..errors import DataError

NAMES = {
    "loss": ("loss", "train_loss", "training_loss", "loss_train", "tr_loss", "ce_loss"),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "grad_norm_l2", "total_norm", "global_grad_norm"),
    "lr": ("lr", "learning_rate", "lr_0", "lr_group_0"),
    "step": ("step", "global_step", "_step", "iteration", "iter", "trainer_global_step"),
}
"""What a signal is called elsewhere, without its directories (`train/loss` is `loss`)."""


@dataclass(frozen=True)
class Point:
    step: int
    loss: float
    grad_norm: float = math.nan
    lr: float = math.nan


def read_curve(path: str | Path) -> list[Point]:
    """From a CSV (also one exported from wandb), the directory of a run, or TensorBoard's files: one of them, or a directory of some."""
    source = Path(path)
    if not source.exists():
        raise DataError(
            f"{source} does not exist.\nTo fix: give a CSV file, the directory of a run, or TensorBoard's files."
        )
    if source.is_dir() and (source / JOURNAL).is_file():
        points = list(_of_journal(source / JOURNAL))
    elif source.is_dir() or "tfevents" in source.name:
        points = list(_of_events(source))
    elif source.suffix == ".jsonl":
        points = list(_of_journal(source))
    else:
        points = list(_of_csv(source))
    if not points:
        raise DataError(f"{source} holds no losses.\nTo fix: give a file with one loss per step.")
    return points


def _signal(name: str) -> str | None:
    """Which signal a column or tag is, by its name. wandb's exports begin with the run's name: `run - train/loss`."""
    plain = name.strip().strip('"').rpartition(" - ")[2].lower()
    if plain.endswith(("__min", "__max")):
        return None
    whole = re.sub(r"[^a-z0-9_]+", "_", plain).strip("_")
    last = re.sub(r"[^a-z0-9_]+", "_", plain.rpartition("/")[2]).strip("_")
    if plain.startswith(("eval", "val", "test")):
        return None
    return next((s for s, names in NAMES.items() if last in names or whole in names or plain in names), None)


def _chosen(names: Iterable[str], source: Path) -> dict[str, str]:
    """The column or tag of each signal."""
    names = list(names)
    found: dict[str, list[str]] = {}
    for name in names:
        if (signal := _signal(name)) is not None:
            found.setdefault(signal, []).append(name)
    # A file may call its loss anything, if that is the only thing that is called so.
    candidates = [name for name in names if "loss" in name.lower() and not name.endswith(("__MIN", "__MAX"))]
    if "loss" not in found and len(candidates) == 1:
        found["loss"] = candidates
    if "loss" not in found:
        listed = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
        raise DataError(
            f"{source} has no loss among {listed or 'its columns: it has none'}.\nTo fix: call the column `loss` "
            "(and `grad_norm` and `lr`, if they are known), in a header line."
        )
    if len(set(found["loss"])) > 1:
        raise DataError(
            f"{source} has several losses: {', '.join(found['loss'])}.\nTo fix: give a file of one run, with one of them."
        )
    return {signal: of[0] for signal, of in found.items()}


def _of_csv(path: Path) -> Iterator[Point]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=first.count)
            rows = csv.DictReader(file, delimiter=delimiter)
            columns = _chosen(rows.fieldnames or [], path)
            for index, row in enumerate(rows):
                values = {signal: _number(row.get(column), path, index) for signal, column in columns.items()}
                if values["loss"] is None:
                    continue  # wandb leaves a gap where something else was logged
                yield _point(index, values)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}.\nTo fix: give a CSV with a header line.") from error


def _point(index: int, values: Mapping[str, float | None]) -> Point:
    step, loss, norm, lr = (values.get(name) for name in ("step", "loss", "grad_norm", "lr"))
    assert loss is not None
    return Point(
        index if step is None or not math.isfinite(step) else int(step),
        loss,
        math.nan if norm is None else norm,
        math.nan if lr is None else lr,
    )


def _number(text: Any, path: Path, line: int) -> float | None:
    if text is None or not str(text).strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise DataError(
            f"{path}, line {line + 2}: {text!r} is not a number.\nTo fix: leave it empty where there is none."
        ) from None


def _of_journal(path: Path) -> Iterator[Point]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
                if entry.get("event") != "step":
                    continue
                numbers = [float(entry.get(name, "nan")) for name in ("loss", "grad_norm", "lr")]
                step = int(entry["step"])
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                continue  # killed in the middle of a line, or damaged
            yield Point(step, *numbers)


def _of_events(path: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = [path] if path.is_file() else sorted(path.rglob("*tfevents*"))
    if not files:
        raise DataError(
            f"{path} holds neither a run nor TensorBoard's files.\nTo fix: give the directory that holds one of them."
        )
    series: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        tags = events.Tags()
        for tag in tags["scalars"]:
            series.setdefault(tag, {}).update({event.step: float(event.value) for event in events.Scalars(tag)})
        for tag in tags.get("tensors", []):
            values = {e.step: e.tensor_proto for e in events.Tensors(tag)}
            series.setdefault(tag, {}).update({s: p.float_val[0] for s, p in values.items() if len(p.float_val) == 1})
    columns = _chosen(series, path)
    columns.pop("step", None)
    for step, loss in sorted(series[columns["loss"]].items()):
        yield _point(step, {"step": step, **{s: series[tag].get(step) for s, tag in columns.items()}, "loss": loss})
