"""The result of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .incident import Incident


@dataclass(repr=False)
class FitResult:
    """What `fit` returns, and what `TrainingStopped` and `Interrupted` carry.

    >>> data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(20, 8, 3)]
    >>> result = SafeTrainer(torch.nn.Linear(3, 1), loss_fn=torch.nn.MSELoss(), train_data=data, config=QUIET).fit()
    >>> result.healthy, result.steps, result.skipped, len(result.losses), result.incidents
    (True, 20, 0, 20, [])
    """

    status: str = "running"
    """`running`, `done`, `stopped` (by a guard), `interrupted` (by a signal), `paused` (by `loop.max_hours`), or `error` (an exception in
    user code)."""
    steps: int = 0
    """Committed optimizer steps."""
    skipped: int = 0
    """Attempted steps that were not committed, fp16 scaler overflows included."""
    rollbacks: int = 0
    steps_undone: int = 0
    """Committed steps that rollbacks have taken back."""
    stop_reason: str | None = None
    """Why the run ended before its last step although nothing was wrong: what `trainer.stop` was given, or `loop.patience`."""
    num_clipped: int = 0
    """Committed steps whose gradient was scaled down to a norm."""
    most_clipped: float = 1.0
    """The smallest share of a gradient's norm that was left by that."""
    overflows: int = 0
    """fp16: steps that the loss scaler skipped; normal while it searches its scale, so not incidents."""
    epochs: int = 0
    """Complete passes over the training data."""
    incidents: list[Incident] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """What is wrong although every number is finite (the guard `sanity`): `step`, `label` (a cause), `text`, `advice` and `names`."""
    losses: list[float] = field(default_factory=list)
    """One per attempted step, NaN included."""
    final_loss: float = math.nan
    """Loss of the last committed step."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Each evaluation's metrics, with its `step`."""
    best: dict[str, float] | None = None
    """The evaluation with the best monitored metric; NaN never wins."""
    seconds: float = 0.0
    """Of training, those before a resume included."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds of it that were not spent on the steps: `recovery` (finding out why steps were bad and repairing them),
    `guards`, `evaluation`, `saving`."""
    snapshots: dict[str, float] = field(default_factory=dict)
    """Copies of the state in memory: `num_taken`, `seconds` spent on them, `bytes` held."""
    checkpoints: dict[str, Any] = field(default_factory=dict)
    """On disk: `num_saved` by this process, `seconds_blocked`, for which training waited, the name of the `newest` one, and
    whether it was `verified`: read again at the end and compared with what was written."""
    error: str | None = None
    """What ended the run, if `status` is `error`."""
    resumes: list[dict[str, Any]] = field(default_factory=list)
    """Each time the run went on in a new process: `from_step`, `steps_repeated` (made before, but not saved), `seconds` from the last
    sign of life to the next committed step, and the `cause` of the end before, None if that was no fault."""
    stragglers: list[dict[str, Any]] = field(default_factory=list)
    """Ranks that were slower than the others in what each does by itself: `rank`, `phase` (data, forward), `seconds` of a step and
    the `median` of all ranks."""
    hangs: list[dict[str, Any]] = field(default_factory=list)
    """What took many times as long as usual: `step`, `unit` (step, evaluation batch, saving, ...), `seconds`, what is `usual`, and the
    `ranks` that the others waited for."""
    islands: dict[str, Any] = field(default_factory=dict)
    """fp32 islands that recovery has grown: their `modules`, and the `yaml` that makes them permanent."""
    patches: list[dict[str, Any]] = field(default_factory=list)
    """Operations that recovery replaced by their safe variant: `file`, `line`, `code`, `operations`, `num_uses`, and the `fix`
    that makes it permanent."""
    quarantined: list[int] = field(default_factory=list)
    """Samples, by their index in the data set, that are left out because they kept causing incidents."""
    run_dir: Path | None = None

    @property
    def attempted(self) -> int:
        return len(self.losses)

    @property
    def healthy(self) -> bool:
        """The run came to its end and no step was refused."""
        return self.status == "done" and not self.incidents

    def __repr__(self) -> str:
        """Short: `losses` has a number for every step."""
        counts = f"steps={self.steps}, skipped={self.skipped}, incidents={len(self.incidents)}"
        shown = f"status={self.status!r}, {counts}, final_loss={self.final_loss:.6g}, best={self.best!r}"
        return f"FitResult({shown}, run_dir={None if self.run_dir is None else str(self.run_dir)!r})"

    def summary(self) -> dict[str, Any]:
        """The dict that `summary.json` holds."""
        return {
            "status": self.status,
            "healthy": self.healthy,
            "stop_reason": self.stop_reason,
            "steps": self.steps,
            "attempted": self.attempted,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "steps_undone": self.steps_undone,
            "overflows": self.overflows,
            "num_clipped": self.num_clipped,
            "most_clipped": self.most_clipped,
            "epochs": self.epochs,
            "final_loss": self.final_loss,
            "best": self.best,
            "seconds": round(self.seconds, 3),
            "timing": {name: round(seconds, 4) for name, seconds in self.timing.items()},
            "snapshots": self.snapshots,
            "checkpoints": self.checkpoints,
            "error": self.error,
            "resumes": self.resumes,
            "stragglers": self.stragglers,
            "hangs": self.hangs,
            "islands": self.islands,
            "patches": self.patches,
            "quarantined": self.quarantined,
            "warnings": self.warnings,
            "incidents": [i.to_dict() for i in self.incidents],
            "run_dir": None if self.run_dir is None else str(self.run_dir),
        }


SAVED_FIELDS = (
    "steps",
    "skipped",
    "rollbacks",
    "steps_undone",
    "overflows",
    "num_clipped",
    "most_clipped",
    "epochs",
    "final_loss",
    "evaluations",
    "best",
    "resumes",
    "warnings",
)
"""Those that a resume goes on with."""
