"""Handles a refused step: finds out why, then climbs the ladder until a rung helps. It ends in a stop at the latest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..checkpoint.policy import CheckpointPolicy
from ..config.schema import Config
from ..core.containment import contained, is_contained
from ..core.incident import Incident
from ..core.verdict import Action, Decision, Verdict, merge
from ..core.view import StepView
from ..data.ahead import read_ahead
from ..data.quarantine import Quarantine
from ..data.stream import BatchStream
from ..guards.islands import Islands
from ..step.deferred import Late
from ..step.step import Step
from ..tensors.rng import RandomState
from .investigation import Investigator, RunRecord
from .ladder import Ladder
from .lineage_end import note_growth, note_indices
from .prevalence import Prevalence
from .refused_step import RefusedStep, Resolution
from .repairs import Repairs


class Saved(Protocol):
    """What is part of a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class Recovery:
    """Calls down only: to the step, which it may retry, and to the checkpoints, which it may go back to."""

    def __init__(
        self,
        config: Config,
        ladder: Ladder,
        step: Step,
        checkpoints: CheckpointPolicy,
        stream: BatchStream,
        run: RunRecord,
    ) -> None:
        self.ladder = ladder
        self._step, self._stream, self._run = step, stream, run
        self._checkpoints = checkpoints
        self.repairs = Repairs(step, checkpoints)
        self.investigator = Investigator(config.forensics, step, run)
        after = config.recovery.quarantine_after if "samples" in config.recovery.heal else None
        self.quarantine = Quarantine(after, run.dir)
        self.prevalence = Prevalence(config.recovery)
        self._said_why = False
        self._unsaved: set[str] = set()
        """Parts whose state could not be taken; later checkpoints go without it too."""

    def resolve(
        self,
        view: StepView,
        decision: Decision,
        window: Sequence[Any],
        random_state: RandomState,
        is_late: bool = False,
    ) -> RefusedStep:
        """Recover from a step that was attempted and undone."""
        case = self._open(
            RefusedStep(view, decision, window, random_state, self._run.open_incident(view, decision), is_late)
        )
        with self._run.phase("recovery", f"investigating step {view.step}"):
            self.investigator.investigate(case)
            self._note_lineage_end(case)
            self._step.transaction.restore(replayed=True)
            if (warnings := self.repairs.accept_if_harmless(case)) is not None:
                for text in warnings:
                    self._run.warn(text)
            else:
                self.investigator.keep_replay(case)
                self._climb(case)
        return case

    def _note_lineage_end(self, case: RefusedStep) -> None:
        with contained(self, "what the run knows of the end of a lineage", "the incident goes without it"):
            known = None if case.diagnosis is None or case.is_late else self._stream.ids(case.window)
            if known is not None and case.diagnosis is not None:
                note_indices(case.incident, known[case.diagnosis.micro_batch])
            note_growth(case.incident, self._checkpoints.snapshots.all(), self._step.model, case.view.step)

    def resolve_bad_state(self, view: StepView, decision: Decision) -> RefusedStep:
        """Recover from a state that was found to be wrong between two steps."""
        incident, random_state = self._run.open_incident(view, decision), self._step.transaction.random_state
        case = self._open(RefusedStep(view, decision, [], random_state, incident, is_step=False))
        with self._run.phase("recovery", f"recovering after step {view.step}"):
            self.investigator.describe_state(case)
            self._climb(case)
        return case

    def resolve_late(self, late: Late) -> RefusedStep:
        """Recover from a deferred step that was refused when its numbers were read."""
        view, decision, pending = late.view, late.decision, late.pending
        if decision.action is Action.STOP and not late.was_bad:  # the update is already in the weights
            self._run.stepped(view, decision, "commit")
            why = Verdict(reason=late.why_applied)
            return self.resolve_bad_state(view, merge([*decision.verdicts.items(), ("loop", why)]))
        self._step.transaction.begin()  # a replay is undone to the present state, not to the one before the newest step
        return self.resolve(view, decision, pending.window, pending.random_state, is_late=True)

    def open_too_late(self, late: Late) -> Incident | None:
        """The incident of a deferred step that was committed, and that a guard would have refused."""
        refusals = [
            (name, verdict) for name, verdict in late.decision.verdicts.items() if verdict.action is Action.SKIP
        ]
        if not refusals:
            return None
        incident = self._run.open_incident(late.view, merge(refusals))
        why = f"{late.why_applied}, so it could not be skipped; only what is not finite is skipped in time"
        incident.decision.action = str(Action.COMMIT)
        incident.decision.reasons = [*incident.decision.reasons, why]
        return incident

    def _open(self, case: RefusedStep) -> RefusedStep:
        case.num_committed = self._run.result.steps
        case.nothing_learned = self.repairs.last_good.nothing_learned
        case.hardly_learned = self.repairs.last_good.hardly_learned
        earlier = [i.cause.label for i in self._run.result.incidents if i.decision.action == "rollback"]
        case.num_equal = earlier.count(case.incident.cause.label)
        case.may_restart = self.ladder.may_climb("restart", case.view.step)
        case.may_reinitialise = self.ladder.may_climb("reinitialise", case.view.step)
        return case

    def _climb(self, case: RefusedStep) -> None:
        if (reason := self._too_prevalent(case)) is not None:
            case.incident.fix = self.prevalence.advice or case.incident.fix
            case.resolution = Resolution(Action.STOP, [reason])
            return
        case.resolution = self._count_samples(case, self.ladder.resolve(case, self.repairs))

    def _too_prevalent(self, case: RefusedStep) -> str | None:
        """Why the run should end, because bad steps are the rule; the same on all ranks."""
        if case.decision.action is Action.STOP:
            return None
        try:
            found = self.prevalence.note(case, self._ahead)
        except Exception as error:
            if not is_contained(error, self.prevalence, "the count of bad steps", "they are not taken for the rule"):
                raise
            found = None
        return next((reason for reason in self._step.exchange.gather(found) if reason is not None), None)

    def _ahead(self, count: int) -> list[Any]:
        return read_ahead(self._stream.source, self._stream.epoch, count)

    def _count_samples(self, case: RefusedStep, resolution: Resolution) -> Resolution:
        """Note which samples of the data set the incident is about; those that keep coming back are left out later."""
        stream = self._stream
        if case.is_late or not case.is_step:
            return resolution
        if (ids := stream.ids(case.window)) is None:
            if (
                not self._said_why
                and self.quarantine.is_on
                and case.guilty_samples
                and (why := stream.source.why_no_ids)
            ):
                self._said_why = True
                self._run.warn(f"bad samples cannot be named by their index in the data, nor left out later: {why}")
            return resolution
        own = [ids[index][sample] for index, samples in case.guilty_samples.items() for sample in samples]
        guilty = [sample for each in self._step.exchange.gather(own) for sample in each]
        said = self.quarantine.note(guilty, case.view.step, stream.epoch, case.decision.reasons[0])
        stream.leave_out(self.quarantine.ids)
        return replace(resolution, reasons=[*resolution.reasons, *(f"quarantine: {reason}" for reason in said)])

    def leave_out_unreadable(self, sample: int, reason: str) -> None:
        """A sample of the data set could not be read; it is left out from the next epoch on."""
        self._run.warn(f"sample {sample} of the data set cannot be read and is left out: {reason}")
        self.quarantine.add(sample, self._step.next_index, self._stream.epoch, reason)

    def report_changes(self) -> None:
        """Put what was changed of the computation, and how to make it permanent, into the result."""
        islands = next((guard for guard in self._step.guards if isinstance(guard, Islands)), None)
        if islands is not None and islands.grown:
            self._run.result.islands = {"modules": list(islands.grown), "yaml": islands.yaml()}
        self._run.result.patches = self._step.patches.to_plain()
        self._run.result.quarantined = self.quarantine.ids

    def state_dict(self) -> dict[str, Any]:
        return self.states_of(self._parts())

    def states_of(self, parts: Mapping[str, Saved]) -> dict[str, Any]:
        """By name. A part that raises is left out, and that is said once: a checkpoint without it is better than none."""
        states = {}
        for name, part in parts.items():
            if name in self._unsaved:
                continue
            try:
                states[name] = part.state_dict()
            except Exception as error:
                what = f"saving the state of {type(part).__name__}"
                if not is_contained(
                    error, part, what, "checkpoints are written without it, and a resume begins with a new one"
                ):
                    raise
                self._unsaved.add(name)
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            if name in state:  # a part that failed was not saved
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Saved]:
        repairs = self.repairs
        return {
            "quarantine": self.quarantine,
            "known": self.investigator,
            "trials": repairs.trials,
            "losses": repairs.last_good,
            "prevalence": self.prevalence,
            "held": self._step.held,
        }
