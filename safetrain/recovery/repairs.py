"""What the ladder may do with the trainer: try a step again, look at the state, go back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.snapshots import Copy
from ..checkpoint.state import TrainState
from ..core.files import to_json, write_text
from ..core.incident import Cause, Origin
from ..core.verdict import Action
from ..data.quarantine import Quarantine
from ..errors import CheckpointError
from ..forensics import Diagnosis, Effort, Step, diagnose
from ..forensics.fixes import ADVICE
from ..forensics.values import statistics
from ..guards.islands import Islands
from ..incidents.bundle import write_replay
from ..tensors import gradients
from ..tensors.nest import copied
from ..tensors.rng import undisturbed_rng
from ..tensors.sharded import local
from . import lockstep
from .blame import attribute
from .case import Case, LastGood, Settlement

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer


MAX_OVERFLOWS = 40
"""Attempts at one step while the fp16 loss scaler looks for its scale; it halves it each time."""


class Workbench:
    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        self._known: dict[Any, tuple[str, str]] = {}
        """The first incident at each place in the source, for which remedies were tried, and its fix."""
        config = trainer.config.recovery
        after = config.quarantine_after if "samples" in config.heal else None
        self.quarantine = Quarantine(after, trainer.run.dir)

    def investigate(self, case: Case) -> None:
        """Find out what went wrong in the step; the answers are put into its incident."""
        incident, diagnosis = case.incident, None
        if not case.has_non_finite_number:
            incident.cause.explanation = "every number of the step is finite, so there is no first bad operation"
        elif case.is_late:
            incident.cause.explanation = "the step was read too late to replay it (loop.host_read_every)"
        elif self._trainer.config.forensics.enabled:
            alone = self._trainer.engine.replays_alone
            diagnosis = self._diagnose(case) if alone else lockstep.locate(self._trainer, case)
        if self._trainer.joint is not None:
            diagnosis = attribute(case, self._trainer.joint, diagnosis)
        if diagnosis is not None:
            self._note(case, diagnosis)

    def describe_state(self, case: Case) -> None:
        """What is known of a state that was found to be bad between two steps: there is no operation to find."""
        model = self._trainer.model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = [label for v in case.decision.verdicts.values() for label in v.evidence.get("bad_state", ())]
        label = next((label for label in found if label.removeprefix("buffer ") in tensors), None)
        if label is None:
            return
        name = label.removeprefix("buffer ")
        kind, (owner, _, own_name) = "parameter" if name == label else "buffer", name.rpartition(".")
        incident, is_start = case.incident, self._trainer.run.result.steps == 0
        incident.origin = Origin(
            phase="params",
            op=kind,
            name=own_name,
            module=owner,
            module_type=type(model.get_submodule(owner)).__name__,
            inputs=[statistics(name, local(tensors[name].detach()))],
        )
        if is_start:
            incident.cause = Cause("corrupt_parameter", f"{kind} {name} was not finite before the first step")
            incident.fix = f"{ADVICE['corrupt_parameter']}."
        else:
            incident.cause.explanation = (
                f"{kind} {name} is not finite after a step in which every number that was looked at was"
            )

    def keep_replay(self, case: Case) -> None:
        """Write down what a replay needs, before anything moves."""
        trainer = self._trainer
        directory = trainer.run.open_bundle(case.incident)
        if directory is None:
            return
        step = f"the replay of step {case.view.step}"
        try:
            if recorded := self._flight_records(case):
                write_text(directory / "flight_recorder.json", to_json(recorded, indent=2) + "\n")
            for part in write_replay(directory, trainer, case):
                trainer.run.warn(f"{step} is kept without {part}")
        except Exception as error:  # a full disk, or a state that cannot be written, must not end the run
            trainer.run.warn(f"{step} could not be written: {error}")

    def _flight_records(self, case: Case) -> dict[str, Any]:
        """What guards have recorded of the steps before, and measured in this one, by guard."""
        records = {guard.name: guard.records() for guard in self._trainer.guards if hasattr(guard, "records")}
        evidence = {name: verdict.evidence.get("activations") for name, verdict in case.decision.verdicts.items()}
        return {name: {"before": before, "refused": evidence.get(name)} for name, before in records.items()}

    def _diagnose(self, case: Case) -> Diagnosis:
        trainer = self._trainer
        # The mean over several micro-batches is rounded in another way, so only a single loss can be compared bitwise.
        loss = case.view.loss if len(case.window) == 1 else None
        step = Step(
            trainer._called_model,
            trainer.training_step,
            case.window,
            trainer.optimizer,
            trainer.engine.precision,
            case.view.loss_scale,
            case.random_state,
            loss=loss if trainer.joint is None else trainer.joint.own_loss,
        )
        effort = Effort(
            remedies=trainer.config.forensics.remedies,
            is_known=lambda origin: _place(origin) in self._known,
            anomaly=any(verdict.evidence.get("detect_anomaly") for verdict in case.decision.verdicts.values()),
        )
        with trainer.patches.uncounted():  # the step ran with them
            diagnosis = diagnose(step, effort)
        trainer.transaction.expect_weights()  # the update was tried on them
        return diagnosis

    def _note(self, case: Case, diagnosis: Diagnosis) -> None:
        incident = case.incident
        diagnosis.fill(incident)
        case.diagnosis = diagnosis
        if diagnosis.origin.phase == "params" and self._trainer.run.result.steps > 0 and not case.is_late:
            # It was finite when the run began, so how it was initialised is not to blame.
            incident.cause.explanation += ": an update before it, or something between the steps, has made it so"
            incident.fix = incident.fix.replace("initialise it, or reload it", "look at the optimizer, or reload it", 1)
        if diagnosis.anomaly:
            incident.cause.explanation += f"; autograd's anomaly mode says: {diagnosis.anomaly}"
        if diagnosis.origin.op is not None:
            first, fix = self._known.setdefault(_place(diagnosis.origin), (incident.id, incident.fix))
            if first != incident.id:
                incident.cause.explanation += f" (the operation of incident {first} again)"
                incident.fix = fix  # what was tried then holds for the same line now

    def absolve(self, case: Case) -> bool:
        """Commit a step that was refused without need; it is no incident."""
        return self._has_harmless_buffer(case) or self._is_hard_batch(case)

    def _is_hard_batch(self, case: Case) -> bool:
        """A loss that was only doubtful counts as if never doubted: when the doubt is not confirmed, or when training may not
        be started again, which is all that could be done about it."""
        trainer, undoubted = self._trainer, case.decision.undoubted
        if case.is_late or undoubted.action is not Action.COMMIT:
            return False
        if trainer.ladder.may_climb("restart", case.view.step) and self._confirms_a_doubt(case):
            return False
        trainer.transaction.rewind()
        measurement, limits = trainer._attempt(case.window)
        return trainer._commit(measurement, trainer._view(measurement, limits), undoubted, case.window)

    def _confirms_a_doubt(self, case: Case) -> bool:
        doubts = {verdict.evidence.get("doubtful") for verdict in case.decision.verdicts.values()}
        if "last_good" in doubts and (not self.has_good_batch() or self.state_problem() is not None):
            return True
        return "start" in doubts and self._is_worse_than_at_the_start(case)

    def _is_worse_than_at_the_start(self, case: Case) -> bool:
        """Whether the weights that training began with are better at this very step, random numbers included."""
        trainer = self._trainer
        first = trainer._keeper.snapshots.first
        if first is None:
            return False
        now = Copy().take(TrainState.gather(trainer, progress=False))
        try:
            first.state.restore_training(trainer)
            case.random_state.restore()
            loss = self._mean_loss(case.window)
        finally:
            now.restore_training(trainer)
            trainer.transaction.expect_weights()
        margin = max(verdict.evidence.get("margin", 0.0) for verdict in case.decision.verdicts.values())
        return case.view.loss > loss + float(margin) * abs(loss)

    def _has_harmless_buffer(self, case: Case) -> bool:
        """A buffer that nothing depends on (a metric, say) is not finite, and nothing else: watch it no longer."""
        trainer = self._trainer
        is_healthy = case.diagnosis is not None and case.diagnosis.healthy
        if not is_healthy or case.incident.trigger.signal != "buffers" or case.has_bad_state:
            return False  # what was bad before the step was not made by it: something has spoiled the state
        trainer.transaction.rewind()
        trainer._attempt(case.window)
        found = trainer.engine.gather(trainer.transaction.exempt_bad_buffers())
        names = list(dict.fromkeys(name for each in found for name in each))
        trainer.transaction.born_bad.update(names)
        trainer._undo(case.view)
        if not names or not self.try_again(case, case.window):
            return False
        trainer.run.warn(
            f"step {case.view.step}: {', '.join(names)} is not finite; nothing depends on it, so it is not watched"
        )
        return True

    def try_again(self, case: Case, window: Sequence[Any]) -> bool:
        """Attempt the step once more with this window, from the same random state; commit it if every guard lets it pass."""
        trainer = self._trainer
        for _ in range(MAX_OVERFLOWS):
            trainer.transaction.rewind()
            try:
                measurement, limits = trainer._attempt(window)
            except Exception:  # what made the step raise the first time does so again: no help, and told already
                break
            view = replace(trainer._view(measurement, limits), refused_loss=case.view.loss)
            decision = trainer._judge(view).undoubted
            if decision.action is not Action.COMMIT:
                break
            if not view.scaler_overflow:
                if trainer._commit(measurement, view, decision, window):
                    return True
                break
            # fp16: not yet a step that can be committed. The scaler lowers its scale, as it does in any step.
            trainer.transaction.restore()
            trainer.engine.update_scale()
            trainer._clear_gradients()
        trainer._undo(case.view)
        return False

    def bad_micro_batches(self, case: Case) -> list[int]:
        """Which micro-batches of the window are not finite on their own."""
        trainer = self._trainer
        trainer.transaction.rewind()
        finite = []
        for batch in case.window:
            try:
                with trainer.alone(), trainer.patches:
                    loss, _ = trainer._forward(batch)
                    trainer.engine.backward(loss / len(case.window))
                norm = gradients.global_norm(gradients.collect(trainer._parameters))
                finite.append(torch.isfinite(loss.detach() + norm))
            except Exception:
                if trainer.joint is None:
                    raise
                finite.append(torch.zeros((), dtype=torch.bool, device=trainer.engine.device))
            trainer._clear_gradients()
            trainer.transaction.restore()
        shares = trainer.engine.share(torch.stack(finite).float()).tolist()
        return [index for index, share in enumerate(shares) if share < 1.0]

    def has_good_batch(self) -> bool:
        return self._trainer.last_good is not None and bool(self._trainer.last_good.window)

    def state_problem(self) -> str | None:
        """What shows that the state is at fault: a window that was good lately gives a good loss no longer. None if they all do."""
        trainer, good = self._trainer, self._trainer.last_good
        if good is None or not good.window:
            return "no step was committed lately, so there is no good batch to tell bad data from a bad state"
        for window, name in ((good.window, "the last good batch"), (good.earlier, "a good batch of a few steps ago")):
            if not window:
                continue
            with undisturbed_rng():
                loss = self._mean_loss(window)
                peak = trainer.transaction.buffer_peak()
            trainer.transaction.restore()
            if trainer.engine.any_rank(peak is not None and not math.isfinite(float(peak))):
                return f"{name} makes a buffer non-finite too: the state is at fault, not the data"
            if not good.is_as_good(loss):
                return f"{name} has become bad too (loss {loss:.4g}): the state is at fault, not the data"
        return None

    def _mean_loss(self, window: Sequence[Any]) -> float:
        """Over all ranks, without gradients. NaN if one of several ranks raises."""
        trainer = self._trainer
        try:
            with torch.no_grad(), trainer.alone(), trainer.patches:
                losses = [trainer._forward(copied(batch))[0] for batch in window]
            loss = torch.stack([loss.float() for loss in losses]).mean()
        except Exception:
            if trainer.joint is None:
                raise
            loss = torch.full((), math.nan, device=trainer.engine.device)
        return float(trainer.engine.share(loss))

    def roll_back(self, case: Case, to: str) -> str | None:
        """Go back, with the data cursor past this step; says where to, or None when there is nothing to go back to."""
        trainer = self._trainer
        if trainer.run.result.steps == 0 and case.needs_probe:
            return None  # no step was ever committed, so the state is the one it would go back to
        before = trainer.run.result.steps
        try:
            step = trainer.rollback(to)
        except CheckpointError:
            return None
        if case.has_bad_state:
            trainer.careful_steps = 20  # an update may have done it: see which
        lost = before - trainer.run.result.steps
        return f"the state of step {step} ({'memory' if to != 'disk' else 'disk'}), {lost} committed steps undone"

    def grow_island(self, module: str) -> None:
        self._trainer.guard("islands").grow(self._trainer.model, module)

    def shrink_island(self, module: str) -> None:
        self._trainer.guard("islands").shrink(module)

    def patch(self, case: Case) -> str | None:
        return None if case.patch is None else self._trainer.patches.add(case.patch, case.incident.fix)

    def unpatch(self, case: Case) -> None:
        if case.patch is not None:
            self._trainer.patches.remove(case.patch)

    def count_samples(self, case: Case, settlement: Settlement) -> Settlement:
        """Note which samples of the data set the incident is about; those that come again and again are left out later."""
        stream = self._trainer.stream
        if case.is_late or not case.is_step or (ids := stream.ids(case.window)) is None:
            return settlement
        own = [ids[index][sample] for index, samples in case.guilty_samples.items() for sample in samples]
        guilty = [sample for each in self._trainer.engine.gather(own) for sample in each]
        said = self.quarantine.note(guilty, case.view.step, stream.epoch, case.decision.reasons[0])
        stream.leave_out(self.quarantine.ids)
        return replace(settlement, reasons=[*settlement.reasons, *(f"quarantine: {reason}" for reason in said)])

    def tell_changes(self) -> None:
        """Put what was changed of the computation, and how to make it permanent, into the result."""
        trainer = self._trainer
        islands = next((guard for guard in trainer.guards if isinstance(guard, Islands)), None)
        if islands is not None and islands.grown:
            trainer.run.result.islands = {"modules": list(islands.grown), "yaml": islands.yaml()}
        trainer.run.result.patches = trainer.patches.to_plain()
        trainer.run.result.quarantined = self.quarantine.ids

    def state_dict(self) -> dict[str, Any]:
        good = self._trainer.last_good
        return {
            "quarantine": self.quarantine.state_dict(),
            "known": [[*place, *first] for place, first in self._known.items()],
            "losses": None if good is None else [good.first, good.lowest, list(good.losses.values)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The last good window itself is not kept: until a step is committed there is no batch to look at."""
        self._known = {(*place,): (first, fix) for *place, first, fix in state["known"]}
        if "quarantine" in state:
            self.quarantine.load_state_dict(state["quarantine"])
        if state["losses"] is not None:
            self._trainer.last_good = LastGood.resumed(*state["losses"])


def _place(origin: Origin) -> tuple[Any, ...]:
    return origin.file, origin.line, origin.op, origin.module
