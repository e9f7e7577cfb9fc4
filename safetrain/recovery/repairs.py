"""What a rung of the ladder may do: try the step again, look at the state, change what is computed, go back."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from ..checkpoint.copies import Copy
from ..checkpoint.policy import CheckpointPolicy
from ..checkpoint.state import TrainState
from ..core.containment import is_contained
from ..core.verdict import Action, Doubt
from ..core.view import StepView
from ..distributed.comm import overwrite
from ..errors import CheckpointError
from ..forensics.frames import is_user
from ..guards.islands import Islands
from ..guards.sdc import Sdc
from ..precision.compiled import lowers_islands
from ..step.step import Step
from ..tensors.rng import undisturbed_rng
from ..tensors.sharded import is_sharded
from .dead import is_dead
from .holding import hold
from .initial import all_layers, odd_layers, reinitialise, standardised
from .last_good import LastGood
from .refused_step import RefusedStep
from .trials import Trials, mean_loss

CAREFUL_STEPS = 20
"""After a bad state, updates whose result is looked at before they count: one of them may have made it."""


class Repairs:
    """What a rung may do about a refused step."""

    def __init__(self, step: Step, checkpoints: CheckpointPolicy) -> None:
        self._step, self._checkpoints = step, checkpoints
        self.last_good = LastGood()
        self._remembers = True
        self.trials = Trials(step, checkpoints, self.last_good)
        self._held_before: tuple[dict[str, Any], list[Any]] = ({}, [])

    def committed(self, window: Sequence[Any], view: StepView) -> None:
        """A step was committed."""
        if not self._remembers:
            return
        try:
            self.last_good.committed(self._step.transaction.window_before(window), view.loss, view.update_size)
            self.last_good.rates = view.lrs
        except Exception as error:
            what = "remembering a good batch"
            if not self.runs_alone or not is_contained(error, self.last_good, what, "none is remembered any more"):
                raise
            self._remembers = False

    # ---- the same step once more -------------------------------------------------------------------------------

    def try_again(self, case: RefusedStep, window: Sequence[Any]) -> bool:
        """Attempt the step once more with this window, from the same random state; commit it if every guard lets it pass."""
        retried = self._step.retry(window, case.view)
        case.applied = None if retried is None else (*retried, window)
        return retried is not None

    def take_over(self, rank: int) -> bool:
        """Weights, averages and optimizer state of that rank, on all; False if each has only a part of them."""
        if is_sharded(self._step.model):
            return False
        state = TrainState.gather(self._step)
        kept = ("transient/", "auxiliary/")  # as buffers go, each rank has its own
        overwrite([tensor for name, tensor in state.tensors.items() if not name.startswith(kept)], rank)
        self._step.transaction.expect_weights()
        return True

    def bad_micro_batches(self, case: RefusedStep) -> list[int]:
        """Which micro-batches of the window are not finite on their own."""
        step, finite = self._step, []
        step.transaction.rewind()
        for batch in case.window:
            try:
                with step.exchange.alone(step):
                    measurement = step.attempt([batch], divisor=len(case.window))
                finite.append(torch.isfinite(measurement.losses_and_norm()).all())
            except Exception:
                if step.exchange.world_size == 1:
                    raise
                # The other ranks wait for an answer.
                finite.append(torch.zeros((), dtype=torch.bool, device=step.device))
            step.undo(case.view.loss_scale)
        shares = step.exchange.mean(torch.stack(finite).float()).tolist()
        return [index for index, share in enumerate(shares) if share < 1.0]

    def accept_if_harmless(self, case: RefusedStep) -> list[str] | None:
        """Commit a step that was refused unnecessarily; it is no incident then. Returns what to warn of, or None if it was
        refused with reason, or that could not be found out."""
        try:
            return self._accepted(case)
        except Exception as error:
            what = f"finding out whether step {case.view.step} is harmless"
            is_theirs = not self.runs_alone or self._passes_through_the_step(error)
            if is_theirs or not is_contained(
                error, self, what, "it stays refused" if case.applied is None else "it is committed"
            ):
                raise
            if case.applied is not None:
                return []
            self._step.undo(case.view.loss_scale)
            return None

    def _passes_through_the_step(self, error: Exception) -> bool:
        """Raised by the user's model, loss or optimizer, or where the weights are moved."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        return any(frame.f_locals.get("self") is self._step or is_user(frame.f_code) for frame in frames)

    def _accepted(self, case: RefusedStep) -> list[str] | None:
        if names := self._has_harmless_buffer(case):
            what = f"{', '.join(names)} is not finite; nothing depends on it, so it is not watched"
            return [f"step {case.view.step}: {what}"]
        if not self._is_harmless(case):
            return None
        return [] if (remark := self.trials.remark()) is None else [remark]

    def _is_harmless(self, case: RefusedStep) -> bool:
        """Whether all that refuse a step are in doubt, and no trial confirms it. The step is then committed."""
        trials, decision = self.trials, case.decision.tried
        if decision.action is not Action.COMMIT:
            return False
        if self._step.exchange.any_rank(bool(self._step.blind_spot())):
            return False  # its loss cannot be computed again, so nothing can be tried
        if case.may_restart and not case.is_late and self._confirms_a_doubt(case):
            return False
        if Doubt.NEW_WEIGHTS in {verdict.doubt for verdict in case.decision.verdicts.values()}:
            if case.may_reinitialise and case.hardly_learned and self._began_here() and all_layers(self._step.model):
                return False
        doubts = {verdict.doubt for verdict in case.decision.verdicts.values()}
        if Doubt.DEAD in doubts:
            windows = {
                id(window): window for window in (case.window, *self.last_good.recent(), *self.last_good.judged())
            }
            if is_dead(self._step, list(windows.values()), case.random_state):
                case.state_problem = f"the outputs depend on no weight, for any of {len(windows)} batches tried"
                return False
        if Doubt.LOWER_RATE in doubts and case.may_restart and (found := trials.lower_rate(case)):
            case.state_problem = found
            return False
        problem = "the loss stays high" if Doubt.BRANCHES in doubts else None
        if problem is None and Doubt.TRIAL in doubts:
            problem = trials.state_is_suspect(case)
        if problem is not None and (found := trials.going_back(case, case.wants_restart and case.may_restart)):
            case.state_problem = f"{problem}; {found}"
            return False
        if case.is_late:
            self._step.learn(case.view, decision)
            case.applied = case.view, decision, case.window
        else:
            case.harm = trials.update(case, decision, Doubt.TRIAL in doubts, self._differs_from)
        return case.harm is None

    def _differs_from(self, case: RefusedStep, view: StepView) -> bool:
        """Whether this second computation of the step gave other gradients, for guards that doubt the first one."""
        for name, verdict in case.decision.verdicts.items():
            if verdict.doubt is Doubt.REPLAY and view.signals.get(f"{name}.gradients") != verdict.evidence["value"]:
                guard = self._step.guards.named(name)
                names = guard.differing() if isinstance(guard, Sdc) else ()
                where = f" for {', '.join(names[:4])}" if names else ""
                case.incident.cause.explanation += where
                return True
        return False

    def _confirms_a_doubt(self, case: RefusedStep) -> bool:
        doubts = {verdict.doubt for verdict in case.decision.verdicts.values()}
        if Doubt.LAST_GOOD_BATCH in doubts and (not self.has_good_batch() or self.state_problem() is not None):
            return True
        return Doubt.SINCE_START in doubts and self._is_worse_than_at_the_start(case)

    def _is_worse_than_at_the_start(self, case: RefusedStep) -> bool:
        """Whether the weights that training began with are better at this very step, random numbers included."""
        step, first = self._step, self._checkpoints.snapshots.first
        if first is None:
            return False
        now = Copy().take(TrainState.gather(step))
        try:
            first.state.restore_training(step)
            case.random_state.restore()
            loss = mean_loss(step, case.window)
        finally:
            now.restore_training(step)
            step.transaction.expect_weights()
        margin = max(verdict.doubt_margin for verdict in case.decision.verdicts.values())
        return case.view.loss > loss + margin * abs(loss)

    def _has_harmless_buffer(self, case: RefusedStep) -> list[str]:
        """Names of buffers that nothing depends on (a metric, say) which are not finite, if nothing else is: they are no longer
        watched, and the step is committed."""
        step = self._step
        is_healthy = case.diagnosis is not None and case.diagnosis.healthy
        if not is_healthy or case.incident.trigger.signal != "buffers" or case.has_bad_state:
            return []  # what was bad before the step was not made by it: something has spoiled the state
        step.transaction.rewind()
        step.attempt(case.window)
        found = step.exchange.gather(step.transaction.exempt_bad_buffers())
        names = list(dict.fromkeys(name for each in found for name in each))
        step.nonfinite_by_design.update(names)
        step.undo(case.view.loss_scale)
        return names if names and self.try_again(case, case.window) else []

    @property
    def runs_alone(self) -> bool:
        """No other rank would wait for what this one does not do."""
        return self._step.exchange.world_size == 1

    def undo(self) -> None:
        """The step as if it had never been tried again."""
        self._step.transaction.restore()
        self._step.clear_gradients()

    # ---- data or state? ----------------------------------------------------------------------------------------

    def has_good_batch(self) -> bool:
        """Was any step committed since the start, a resume or a rollback?"""
        return bool(self.last_good.window)

    def state_problem(self) -> str | None:
        """What shows that the state is at fault: a window that was good lately no longer gives a good loss. None if they all still do."""
        step, good = self._step, self.last_good
        if not good.window:
            return "no step was committed lately, so there is no good batch to tell bad data from a bad state"
        for window, name in ((good.window, "the last good batch"), (good.earlier, "a good batch from a few steps ago")):
            if not window:
                continue
            with undisturbed_rng():
                loss = mean_loss(step, window)
                peak = step.transaction.buffer_peak()
            step.transaction.restore()
            if step.exchange.any_rank(peak is not None and not math.isfinite(float(peak))):
                return f"{name} makes a buffer non-finite too: the state is at fault, not the data"
            if not good.is_as_good(loss):
                return f"{name} is bad now too (loss {loss:.4g}): the state is at fault, not the data"
        return None

    # ---- going back --------------------------------------------------------------------------------------------

    def roll_back(self, case: RefusedStep, to: str) -> str | None:
        """Go back to the newest `trusted` snapshot (an older one if that did not help), the newest checkpoint on `disk`, or the
        `first` snapshot, with the data cursor past this step; says where to, or None when there is nothing to go back to."""
        if case.num_committed == 0 and case.needs_probe:
            return None  # no step was ever committed, so the state is the one it would go back to
        try:
            step, num_committed = self.go_back(to)
        except CheckpointError:
            return None
        if case.has_bad_state:
            self._step.careful_steps = CAREFUL_STEPS
        lost = case.num_committed - num_committed
        return f"the state of step {step} ({'memory' if to != 'disk' else 'disk'}), {lost} committed steps undone"

    def _began_here(self) -> bool:
        """The first snapshot is the beginning of training, and holds whole weights."""
        first = self._checkpoints.snapshots.first
        return first is not None and first.state.rest["num_committed"] == 0 and not is_sharded(self._step.model)

    def reinitialise(self, case: RefusedStep) -> list[str]:
        """Go back to the beginning of the run, and give layers new weights; which ones. Nothing happens if none of them is wrong, or if
        the run began with weights that had learned something."""
        step, first = self._step, self._checkpoints.snapshots.first
        if first is None or not self._began_here():
            return []
        now = Copy().take(TrainState.gather(step))
        first.state.restore_training(step)
        none_learns = case.incident.cause.label in ("dead_network", "vanishing_gradients")
        names = odd_layers(step.model) or (all_layers(step.model) if none_learns else [])
        if not names:
            now.restore_training(step)
            step.transaction.expect_weights()
            return []
        self.go_back("first")
        reinitialise(step.model, names, seed=case.view.step)
        if none_learns and step.exchange.world_size == 1:
            buffers = [buffer.clone() for buffer in step.model.buffers()]
            with standardised(step.model, names):
                mean_loss(step, case.window[:1])
            for buffer, before in zip(step.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        if step.ema is not None:
            step.ema.start_again()
        step.transaction.expect_weights()
        self._checkpoints.renew_first()
        return names

    def go_back(self, to: str, skip_windows: int = 0) -> tuple[int, int]:
        """Restore an earlier state; returns its step, and how many committed steps it contains."""
        step, num_committed = self._checkpoints.rollback(to, skip_windows)
        self.last_good.forget()
        return step, num_committed

    # ---- changing what is computed -----------------------------------------------------------------------------

    @property
    def may_grow_islands(self) -> bool:
        return not lowers_islands(self._step.model)

    def grow_island(self, module: str) -> None:
        """Keep a module in float32 from now on."""
        self._islands().grow(self._step.model, module)

    def shrink_island(self, module: str) -> None:
        """Take that back."""
        self._islands().shrink(module)

    def hold(self, case: RefusedStep) -> str | None:
        """Leave something as it is from now on; says what, or None if nothing is known that could be."""
        held = self._step.held
        self._held_before = held.state_dict(), [group.get("eps") for group in self._step.optimizer.param_groups]
        return hold(self._step, case, self.last_good.rates)

    def release(self) -> None:
        """Take that back."""
        held, eps = self._held_before
        self._step.held.load_state_dict(held)
        for group, value in zip(self._step.optimizer.param_groups, eps, strict=True):
            if value is not None:
                group["eps"] = value

    def _islands(self) -> Islands:
        islands = self._step.guards.named(Islands.name)
        assert isinstance(islands, Islands)
        return islands

    def patch(self, case: RefusedStep) -> str | None:
        """From now on, run the safe variant of the operation at the incident's line; says which, or None if it does already."""
        return None if case.patch is None else self._step.patches.add(case.patch, case.incident.fix)

    def unpatch(self, case: RefusedStep) -> None:
        """Take that back."""
        if case.patch is not None:
            self._step.patches.remove(case.patch)
