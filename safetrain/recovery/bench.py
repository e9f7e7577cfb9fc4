"""What the ladder may do with the trainer: try a step again, look at the state, go back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .. import gradients
from ..batch import copied
from ..bundle import write_replay
from ..errors import CheckpointError
from ..forensics import Effort, Step, diagnose
from ..incident import Origin
from ..rng import undisturbed_rng
from ..verdict import Action
from .case import Case

if TYPE_CHECKING:
    from ..trainer import SafeTrainer


class Workbench:
    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        self._known: dict[Any, str] = {}
        """The first incident at each place in the source, by which remedies were tried."""

    def investigate(self, case: Case) -> None:
        """Keep what a replay needs, and find out what went wrong in the step; the answers are put into its incident."""
        trainer, incident = self._trainer, case.incident
        options = trainer.config.forensics
        facts = {"precision": trainer.engine.precision, "loss_scale": case.view.loss_scale, "loss": case.view.loss}
        if (directory := trainer.run.open_bundle(incident)) is not None:
            state = trainer.model.state_dict()
            write_replay(directory, case.window, case.random_state, state, facts, options.max_bundle_mb)
        value = incident.trigger.value
        if not isinstance(value, float) or math.isfinite(value):
            incident.cause.explanation = "every number of the step is finite, so there is no first bad operation"
        elif case.is_late:
            incident.cause.explanation = "the step was read too late to replay it (loop.host_read_every)"
        elif options.enabled:
            self._diagnose(case)

    def _diagnose(self, case: Case) -> None:
        trainer, incident = self._trainer, case.incident
        step = Step(
            trainer._called_model,
            trainer.training_step,
            case.window,
            trainer.optimizer,
            trainer.engine.precision,
            case.view.loss_scale,
            case.random_state,
            # The mean over several micro-batches is rounded in another way, so only a single loss can be compared bitwise.
            loss=case.view.loss if len(case.window) == 1 else None,
        )
        effort = Effort(
            remedies=trainer.config.forensics.remedies, is_known=lambda origin: _place(origin) in self._known
        )
        diagnosis = diagnose(step, effort)
        diagnosis.fill(incident)
        case.notes["micro_batch"] = diagnosis.micro_batch
        if diagnosis.origin.op is not None:
            first = self._known.setdefault(_place(diagnosis.origin), incident.id)
            if first != incident.id:
                incident.cause.explanation += f" (the operation of incident {first} again)"

    def try_again(self, case: Case, window: Sequence[Any]) -> bool:
        """Attempt the step once more with this window, from the same random state; commit it if every guard lets it pass."""
        trainer = self._trainer
        trainer.transaction.rewind()
        measurement, limits = trainer._attempt(window)
        view = replace(trainer._view(measurement, limits), refused_loss=case.view.loss)
        decision = trainer._judge(view)
        if decision.action is Action.COMMIT and not view.scaler_overflow:
            trainer._commit(measurement, view, decision, window)
            return True
        trainer._undo(view)
        return False

    def bad_micro_batches(self, case: Case) -> list[int]:
        """Which micro-batches of the window are not finite on their own."""
        trainer = self._trainer
        trainer.transaction.rewind()
        finite = []
        for batch in case.window:
            with trainer.engine.gradient_sync(trainer._called_model, sync=False):
                loss, _ = trainer._forward(batch)
                trainer.engine.backward(loss / len(case.window))
            norm = gradients.global_norm(gradients.collect(trainer._parameters))
            finite.append(torch.isfinite(loss.detach() + norm))
            trainer._clear_gradients()
            trainer.transaction.restore()
        shares = trainer.engine.share(torch.stack(finite).float()).tolist()
        return [index for index, share in enumerate(shares) if share < 1.0]

    def state_is_sound(self) -> bool | None:
        """Does the last good window still give about the loss it gave? None when there is none yet."""
        trainer = self._trainer
        if trainer._last_good is None:
            return None
        window, before = trainer._last_good
        with torch.no_grad(), undisturbed_rng():
            losses = [trainer._forward(copied(batch))[0] for batch in window]
        trainer.transaction.restore()
        now = float(trainer.engine.share(torch.stack([loss.float() for loss in losses]).mean()))
        return math.isfinite(now) and now <= before + 0.5 * abs(before) + 1e-6

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
        lost = before - trainer.run.result.steps
        return f"the state of step {step} ({'memory' if to != 'disk' else 'disk'}), {lost} committed steps undone"

    def grow_island(self, case: Case, module: str) -> None:
        self._trainer.guard("islands").grow(self._trainer.model, module)

    def patch(self, case: Case) -> str | None:
        origin, remedy = case.incident.origin, case.incident.verified("safe_op")
        if remedy is None or origin.file is None or origin.line is None:
            return None
        return self._trainer.patches.add(origin.file, origin.line, remedy.target)

    def unpatch(self, case: Case) -> None:
        origin, remedy = case.incident.origin, case.incident.verified("safe_op")
        if remedy is not None and origin.file is not None and origin.line is not None:
            self._trainer.patches.remove(origin.file, origin.line, remedy.target)


def _place(origin: Origin) -> tuple[Any, ...]:
    return origin.file, origin.line, origin.op, origin.module
