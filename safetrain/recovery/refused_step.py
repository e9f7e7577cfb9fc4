"""A refused step, as recovery sees it, and what was done about it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.causes import CAUSES
from ..core.incident import Incident
from ..core.verdict import Action, Decision, Doubt
from ..core.view import StepView
from ..distributed.agreement import LocalBlame
from ..errors import UsageError
from ..forensics import Diagnosis
from ..forensics.samples_of import select
from ..forensics.substitutes import Patch
from ..tensors.nest import num_samples
from ..tensors.rng import RandomState


@dataclass
class RefusedStep:
    """A refused step. The step has already been undone."""

    view: StepView
    decision: Decision
    window: Sequence[Any]
    random_state: RandomState
    incident: Incident
    """With what the investigation found."""
    is_late: bool = False
    """The step lies some steps back (`loop.host_read_every`), so it cannot be tried again."""
    is_step: bool = True
    """False: the state was found to be wrong between two steps."""
    num_committed: int = 0
    """Committed steps before it, without those that a rollback has undone."""
    may_restart: bool = False
    """Training may be started again from the beginning."""
    may_reinitialise: bool = False
    """Layers may be given new weights."""
    nothing_learned: bool = False
    """No committed step had a lower loss than the first one."""
    hardly_learned: bool = False
    """The losses are still about what they were at first, and were never far below."""
    num_equal: int = 0
    """Incidents before it that had the same cause."""
    was_reinitialised: bool = False
    """Some layers have new weights, so that the learning rate need not be lowered."""
    harm: str | None = None
    """What a trial of the update has shown that it would do."""
    state_problem: str | None = None
    """What trials have shown: the state is at fault, and going back is better."""
    lr_share: float | None = None
    """The share of the learning rate at which going back was best."""
    diagnosis: Diagnosis | None = None
    """What the investigation found; None if there was none."""
    local_blame: LocalBlame | None = None
    """With several processes: which samples of this one's window are at fault."""
    resolution: Resolution | None = None
    """What was done about it in the end; None if it was refused unnecessarily, and is committed."""
    applied: tuple[StepView, Decision, Sequence[Any]] | None = None
    """View and decision of the attempt that was committed in the end, and its window, which may be a part of the refused one. An
    fp16 overflow that the scaler handles counts too."""

    @property
    def guilty_micro_batch(self) -> int:
        return 0 if self.diagnosis is None else self.diagnosis.micro_batch

    @property
    def guilty_samples(self) -> dict[int, list[int]]:
        """Rows that are at fault, by the index of their micro-batch: those that the replay found, unless they are most of a batch
        (then the computation is wrong, not the data), and those that a guard named."""
        if self.local_blame is not None:
            return self.local_blame.guilty
        found: dict[int, set[int]] = {self.guilty_micro_batch: set(self.incident.samples)}
        if 2 * len(self.incident.samples) > num_samples(self.window[self.guilty_micro_batch]):
            found.clear()
        for name, verdict in self.decision.verdicts.items():
            for index, rows in verdict.bad_samples.items():
                self._check_rows(name, index, rows)
                found.setdefault(index, set()).update(rows)
        return {index: sorted(samples) for index, samples in found.items()}

    def _check_rows(self, guard: str, index: int, rows: Sequence[int]) -> None:
        sizes = [num_samples(batch) for batch in self.window]
        if (
            index not in range(len(sizes))
            or not isinstance(rows, Collection)
            or not all(hasattr(row, "__index__") and row in range(sizes[index]) for row in rows)
        ):
            raise UsageError(
                f"guard {guard}: bad_samples is {{{index!r}: {rows!r}}}, but the window's micro-batches have {sizes} samples.\n"
                "To fix: give rows, counted from 0, by the index of their micro-batch."
            )

    @property
    def may_drop_samples(self) -> bool:
        """The replay found samples that are at fault, and they are not most of a batch: then the computation would be wrong."""
        if self.local_blame is not None:
            return self.local_blame.all_can_drop
        samples = self.incident.samples
        return bool(samples) and 2 * len(samples) <= num_samples(self.window[self.guilty_micro_batch])

    def without_guilty_samples(self) -> list[Any]:
        """The window, on this rank, without the samples that the replay has shown to be at fault."""
        guilty = (
            {self.guilty_micro_batch: self.incident.samples} if self.local_blame is None else self.local_blame.droppable
        )
        window = list(self.window)
        for index, samples in guilty.items():
            size = num_samples(window[index])
            window[index] = select(window[index], [i for i in range(size) if i not in samples], size)
        return window

    @property
    def island(self) -> str | None:
        """The module that, kept in float32, was seen to keep the step finite."""
        return None if self.diagnosis is None else self.diagnosis.island

    @property
    def patch(self) -> Patch | None:
        """The safe variant of an operation that was seen to keep the step finite."""
        return None if self.diagnosis is None else self.diagnosis.patch

    @property
    def is_non_finite(self) -> bool:
        """Some number of the step itself is NaN or Inf, and the state before it was sound."""
        return self.has_non_finite_number and not self.has_bad_state

    @property
    def has_non_finite_number(self) -> bool:
        values = (self.view.loss, self.view.grad_norm, *self.view.signals.values(), self.incident.trigger.value)
        return any(isinstance(value, float) and not math.isfinite(value) for value in values)

    @property
    def has_bad_state(self) -> bool:
        return any(v.bad_state for v in self.decision.verdicts.values())

    @property
    def sound_rank(self) -> int | None:
        """A rank whose state the others can take over."""
        return next((v.sound_rank for v in self.decision.verdicts.values() if v.sound_rank is not None), None)

    @property
    def blamed_ranks(self) -> tuple[int, ...]:
        """Those that a guard has named."""
        found = (finding.ranks for v in self.decision.verdicts.values() for finding in v.findings)
        return next((ranks for ranks in found if ranks), ())

    @property
    def is_fault_of_schedule(self) -> bool:
        """The learning rate is not finite. Neither another batch nor an earlier state changes that."""
        return self.incident.trigger.signal == "lr"

    @property
    def since(self) -> int | None:
        """The first step of the trouble, if a guard knows it."""
        return min((v.since for v in self.decision.verdicts.values() if v.since is not None), default=None)

    @property
    def is_rate_too_high(self) -> bool:
        """A trial has shown that a lower learning rate gets further from the start."""
        return self.lr_share is not None and any(v.doubt is Doubt.LOWER_RATE for v in self.decision.verdicts.values())

    @property
    def asks_for_restart(self) -> bool:
        return any(v.restart for v in self.decision.verdicts.values())

    @property
    def wants_restart(self) -> bool:
        """No progress yet, so there is nothing to go back to but the beginning."""
        if self.was_reinitialised:
            return False
        if self.asks_for_restart:
            return True
        return self.nothing_learned and not self.has_bad_state and not self.is_fault_of_data

    @property
    def restart_shares(self) -> list[float | None]:
        """By what a restart lowers the learning rate: the share that was tried, or the usual one (None), twice if the loss grew a
        millionfold."""
        if self.lr_share is not None:
            return [self.lr_share]
        expected = [v.expected_loss for v in self.decision.verdicts.values() if v.expected_loss is not None]
        return [None, None] if any(self.view.loss > 1e6 * abs(level) for level in expected) else [None]

    @property
    def needs_probe(self) -> bool:
        """A rollback is asked for only because of refusals in a row, which a run of bad data explains as well as a bad state."""
        asking = [v for v in self.decision.verdicts.values() if v.action is Action.ROLLBACK]
        return bool(asking) and all(v.if_state_is_bad for v in asking)

    @property
    def is_fault_of_data(self) -> bool:
        """A sample, a formula or a transient fault is known to be the cause, not the way training goes."""
        transient = self.incident.replay.reproduced is False
        return transient or bool(self.incident.samples) or CAUSES[self.incident.cause.label].is_fault_of_data


@dataclass(frozen=True)
class Resolution:
    """What was done in the end."""

    action: Action
    """COMMIT: the step was repaired and committed. SKIP, ROLLBACK, STOP as everywhere."""
    reasons: Sequence[str] = ()
    """What each rung that was tried has to say."""
    is_dynamics: bool = False
    """The training dynamics are at fault, so the learning rate should be lowered."""
