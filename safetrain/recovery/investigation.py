"""Finds out why a step was refused, and keeps what a replay of it needs."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ..config.schema import ForensicsConfig
from ..core.causes import CAUSES, UNKNOWN
from ..core.containment import contained, is_contained
from ..core.files import to_json, write_text
from ..core.incident import Cause, Incident, Origin
from ..core.result import FitResult
from ..core.verdict import Decision
from ..core.view import StepView
from ..forensics import Diagnosis, Effort, diagnose
from ..forensics import Step as Replayed
from ..forensics.values import statistics
from ..incidents.bundle import RecordedStep, write_replay
from ..step.step import Step
from ..tensors.sharded import local
from . import lockstep
from .blame import attribute
from .refused_step import RefusedStep

_NAMES_SAMPLES = re.compile(r"\bsamples? \[?\d")


class RunRecord(Protocol):
    """The record of a run, as far as recovery writes to it."""

    result: FitResult
    dir: Path | None
    shared_dir: Path

    def warn(self, text: str) -> None: ...

    def phase(self, name: str, doing: str) -> AbstractContextManager[None]: ...

    def open_incident(self, view: StepView, decision: Decision) -> Incident: ...

    def stepped(self, view: StepView, decision: Decision, outcome: str) -> None: ...

    def open_bundle(self, incident: Incident) -> Path | None: ...


class Investigator:
    def __init__(self, config: ForensicsConfig, step: Step, run: RunRecord) -> None:
        self._config, self._step, self._run = config, step, run
        self.known: dict[Any, tuple[str, str]] = {}
        """The first incident at each place in the source, for which remedies were tried, and its fix."""

    def investigate(self, case: RefusedStep) -> None:
        """Find out what went wrong in the step; the answers are put into its incident."""
        incident, diagnosis, step = case.incident, None, self._step
        if incident.cause.label != UNKNOWN:
            pass  # a guard knows it
        elif not case.has_non_finite_number:
            incident.cause.explanation = "every number of the step is finite, so there is no first bad operation"
        elif case.is_late:
            incident.cause.explanation = "the step was read too late to replay it (loop.host_read_every)"
        elif self._config.enabled:
            alone = step.exchange.replays_alone(step.model)
            diagnosis = self._contained(case) if alone else lockstep.locate(step, case)
        diagnosis = attribute(case, step, diagnosis)
        if diagnosis is not None:
            with contained(
                self, f"describing what step {case.view.step} went wrong by", "the incident goes without the rest"
            ):
                self._note(case, diagnosis)

    def _contained(self, case: RefusedStep) -> Diagnosis | None:
        step = self._step
        try:
            return self._diagnose(case)
        except Exception as error:
            what = f"the investigation of step {case.view.step}"
            if step.exchange.world_size > 1 or not is_contained(
                error, self, what, "the step is recovered from without it"
            ):
                raise
            step.transaction.restore()
            step.clear_gradients()
            step.transaction.expect_weights()
            case.incident.cause.explanation = f"the investigation itself failed ({type(error).__name__}: {error})"
            return None

    def _diagnose(self, case: RefusedStep) -> Diagnosis:
        step = self._step
        model, optimizer = step.to_replay()
        replayed = Replayed(
            model,
            step.training_step,
            case.window,
            optimizer,
            step.precision.name,
            case.view.loss_scale,
            case.random_state,
            loss=step.exchange.own_loss(case.view),
        )
        effort = Effort(
            remedies=self._config.remedies,
            is_known=lambda origin: _place(origin) in self.known,
            max_seconds=self._config.max_seconds,
            anomaly=any(verdict.detect_anomaly for verdict in case.decision.verdicts.values()),
        )
        with step.patches.uncounted():  # the step ran with them
            diagnosis = diagnose(replayed, effort)
        step.transaction.expect_weights()  # the update was tried on them
        return diagnosis

    def _note(self, case: RefusedStep, diagnosis: Diagnosis) -> None:
        incident = case.incident
        diagnosis.fill(incident)
        case.diagnosis = diagnosis
        if diagnosis.healthy and (blind_spot := self._step.blind_spot()):  # no transient fault: it was not run again
            incident.cause, incident.replay.reproduced = Cause("unknown", blind_spot), None
        if diagnosis.origin.phase == "params" and case.num_committed > 0 and not case.is_late:
            # It was finite when the run began, so how it was initialised is not to blame.
            incident.cause.explanation += ": an update before it, or something between the steps, has made it so"
            incident.fix = incident.fix.replace("initialise it, or reload it", "look at the optimizer, or reload it", 1)
        if diagnosis.anomaly:
            incident.cause.explanation += f"; autograd's anomaly mode says: {diagnosis.anomaly}"
        if diagnosis.origin.op is not None:
            first, fix = self.known.setdefault(_place(diagnosis.origin), (incident.id, incident.fix))
            if first != incident.id:
                incident.cause.explanation += f" (the operation of incident {first} again)"
                if not _NAMES_SAMPLES.search(fix):  # those of the first one are not those of this one
                    incident.fix = fix  # what was tried then holds for the same line now

    def describe_state(self, case: RefusedStep) -> None:
        """What is known of a state that was found to be bad between two steps: there is no operation to find."""
        model = self._step.model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = [label for v in case.decision.verdicts.values() for label in v.bad_state]
        label = next((label for label in found if label.removeprefix("buffer ") in tensors), None)
        if label is None:
            return
        name = label.removeprefix("buffer ")
        kind, (owner, _, own_name) = "parameter" if name == label else "buffer", name.rpartition(".")
        incident = case.incident
        incident.origin = Origin(
            phase="params",
            op=kind,
            name=own_name,
            module=owner,
            module_type=type(model.get_submodule(owner)).__name__,
            inputs=[statistics(name, local(tensors[name].detach()))],
        )
        if case.num_committed == 0:
            incident.cause = Cause("corrupt_parameter", f"{kind} {name} was not finite before the first step")
            incident.fix = f"{CAUSES['corrupt_parameter'].advice}."
        else:
            incident.cause.explanation = (
                f"{kind} {name} is not finite after a step in which every number that was looked at was"
            )

    def keep_replay(self, case: RefusedStep) -> None:
        """Write down what a replay needs, before anything moves."""
        directory = self._run.open_bundle(case.incident)
        if directory is None:
            return
        replay = f"the replay of step {case.view.step}"
        try:
            if recorded := self._flight_records(case):
                write_text(directory / "flight_recorder.json", to_json(recorded, indent=2) + "\n")
            for part in write_replay(directory, self._recorded(case), self._config.max_bundle_mb):
                self._run.warn(f"{replay} is kept without {part}")
        except Exception as error:  # a full disk, or a state that cannot be written, must not end the run
            self._run.warn(f"{replay} could not be written: {error}")

    def _recorded(self, case: RefusedStep) -> RecordedStep:
        step, rollbacks = self._step, self._step.history.rollback_steps
        # The mean over several micro-batches, or ranks, is rounded in another way, so only a single loss can be compared.
        is_single = len(case.window) == 1 and step.exchange.world_size == 1
        return RecordedStep(
            incident=case.incident,
            window=case.window,
            random_state=case.random_state,
            model=step.model,
            auxiliary_modules=step.auxiliary_modules,
            optimizer=step.optimizer,
            patches=step.patches,
            precision=step.precision.name,
            loss_scale=case.view.loss_scale,
            loss=case.view.loss if is_single else None,
            num_committed=case.num_committed,
            last_rollback=rollbacks[-1] if rollbacks else None,
            is_late=case.is_late,
            run_dir=self._run.shared_dir,
        )

    def _flight_records(self, case: RefusedStep) -> dict[str, Any]:
        """What guards have recorded of the steps before, and measured in this one, by guard."""
        found = {}
        for guard in self._step.guards:
            verdict = case.decision.verdicts.get(guard.name)
            before, refused = guard.records(), None if verdict is None else verdict.recording
            if before or refused is not None:
                found[guard.name] = {"before": before, "refused": refused}
        return found

    def state_dict(self) -> list[list[Any]]:
        return [[*place, *first] for place, first in self.known.items()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        self.known = {(*place,): (first, fix) for *place, first, fix in state}


def _place(origin: Origin) -> tuple[Any, ...]:
    return origin.file, origin.line, origin.op, origin.module
