"""Experiment trackers other than TensorBoard, through accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.incident import Incident
from ..errors import UsageError
from .scalars import eval_scalars, flat_settings, step_scalars
from .sink import Sink, StepRecord
from .vitals import Vitals


class Tracker(Sink):
    """One of accelerate's trackers. It logs what TensorBoard does, and is set up by environment variables of its own."""

    def __init__(self, name: str, project: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self.name = name
        self._settings = flat_settings(settings)
        self._tracker = _open(name, project, run_dir)

    def started(self, about: Mapping[str, Any]) -> None:
        self._tracker.store_init_configuration(self._settings)

    def logged(self, record: StepRecord, vitals: Vitals) -> None:
        self._log(step_scalars(record, vitals), record.view.step)

    def evaluated(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._log(eval_scalars(metrics), int(metrics["step"]))

    def incident(self, incident: Incident) -> None:
        if self.name in ("wandb", "trackio"):  # the others take numbers only
            self._tracker.log({"health/incident": f"{incident.cause.label}: {incident.headline()}"}, step=incident.step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(values), step=step)

    def close(self) -> None:
        self._tracker.finish()


def check_available(names: list[str]) -> None:
    """Accelerate would silently go without a tracker whose package, which has its name, is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"logging.trackers asks for {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed.\n"
            f"To fix: pip install {' '.join(missing)}, or take it out of logging.trackers."
        )


def _open(name: str, project: str, run_dir: Path) -> Any:
    from accelerate import tracking

    run_name = run_dir.name
    if name == "wandb":
        tracker: Any = tracking.WandBTracker(project, name=run_name, dir=str(run_dir))
    elif name == "mlflow":
        tracker = tracking.MLflowTracker(project, logging_dir=str(run_dir / "mlruns"), run_name=run_name)
    elif name == "trackio":
        tracker = tracking.TrackioTracker(project, name=run_name)
    else:
        tracker = tracking.AimTracker(project, logging_dir=str(run_dir))
    if hasattr(tracker, "start"):  # later versions of accelerate open it in a second call
        tracker.start()
    return tracker
