"""Steps whose numbers reach the host several at a time.

A fused optimizer skips a bad update on the device (`optimizer.found_inf`), so the host need not know yet. It learns up to
`loop.host_read_every` steps later, with the right step numbers. Until then the schedule runs as if every step had been
committed; it is put right when the numbers arrive.

All that the device can decide is whether a number is finite. A step that needs more is judged on the host at once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.verdict import Action, Decision, Verdict, merge
from ..core.view import Limits, StepView
from ..errors import UsageError
from ..tensors import gradients
from ..tensors.rng import RandomState
from .measurement import Measurement

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer


@dataclass
class Pending:
    measurement: Measurement
    bad: Tensor
    view_fields: dict[str, Any]
    """What a view of the step needs that is known on the host already."""
    lr_scale: float
    window: Sequence[Any]
    random_state: RandomState
    batch: list[tuple[Tensor, Tensor]]
    """Tensors of the window that the step may have written to, with their values before it."""


UNDONE = Verdict(Action.ROLLBACK, reason="undone by the rollback of a step before it")


class DeferredCommits:
    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        self._every = trainer.config.loop.host_read_every
        self._pending: list[Pending] = []
        self._lr_scale = 1.0
        self._num_since_scale = 0
        """Steps since the guards were last asked for the learning-rate scale. Only `commit` counts them: bringing steps to
        the host sooner, before something is saved say, changes no number."""
        self._schedule: tuple[Any, list[dict[str, Any]]] | None = None
        self._last_view: StepView | None = None
        self._check()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def _check(self) -> None:
        trainer, optimizer = self._trainer, self._trainer.optimizer
        fix = "To fix: set loop.host_read_every=1."
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False)):
            raise UsageError(
                f"loop.host_read_every={self._every} needs an optimizer that can skip a bad update on the device, and "
                f"{type(optimizer).__name__} was not made with fused=True.\nTo fix: use torch.optim.AdamW (or Adam, SGD) with "
                "fused=True, or set loop.host_read_every=1."
            )
        if trainer.engine.precision == "fp16":
            raise UsageError(f"loop.host_read_every={self._every} does not work with the fp16 loss scaler.\n{fix}")
        if trainer.joint is not None:
            raise UsageError(
                f"loop.host_read_every={self._every} does not work with several processes: they agree on each step before it is "
                f"applied.\n{fix}"
            )
        for guard in trainer.guards:
            if getattr(guard.config, "drop_micro_batch", False):
                raise UsageError(
                    f"loop.host_read_every={self._every} and guards.{guard.name}.drop_micro_batch exclude each other: a bad "
                    f"window is known too late to try it again.\n{fix}"
                )

    def __enter__(self) -> DeferredCommits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in ("found_inf", "grad_scale"):
            self._trainer.optimizer.__dict__.pop(name, None)
        if error is not None:
            pending, self._pending = self._pending, []
            for each in self._read(pending):
                self._record(*each)

    def commit(self, measurement: Measurement, limits: Limits, window: Sequence[Any]) -> bool:
        """Apply the step unless it is non-finite, decided on the device. False: it must be judged on the host."""
        trainer, optimizer = self._trainer, self._trainer.optimizer
        if not self._can_decide_on_device():
            if not self.settle():
                return False
            trainer._clear_gradients()  # they were computed with weights that are no longer there
            self.tell_undone(trainer._view(measurement, limits))
            return True
        if not self._pending:
            self._remember_schedule()
        known = {"step": trainer.step, "epoch": trainer.stream.epoch}
        view_fields = {**known, "lrs": trainer.scheduled_lrs(), "limits": limits}
        bad = ~torch.isfinite(measurement.losses_and_norm()).all()
        if (buffer_peak := trainer.transaction.buffer_peak()) is not None:
            bad = bad | ~torch.isfinite(buffer_peak)
        gradients.clip(trainer._groups, trainer._parameters, limits, measurement.grad_norm, None)
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        with trainer.scaled_lr(self._lr_scale):
            optimizer.step()
        trainer.transaction.restore_where(bad)
        trainer.advance_schedule()
        if trainer.ema is not None:
            trainer.ema.update(refused=bad)
        trainer._clear_gradients()
        transaction = trainer.transaction
        self._pending.append(
            Pending(
                measurement,
                bad,
                view_fields,
                self._lr_scale,
                window,
                transaction.random_state,
                transaction.batch_before(),
            )
        )
        self._num_since_scale += 1
        if self._num_since_scale >= self._every:
            self._num_since_scale = 0
            self.settle()
            self._lr_scale = self._next_lr_scale()
        return True

    def _can_decide_on_device(self) -> bool:
        """A bad learning rate is known here, and is none of the numbers that the device looks at. The momentum of SGD is made
        in a parameter's first step, out of uninitialised memory if that step is skipped on the device."""
        groups, state = self._trainer.optimizer.param_groups, self._trainer.optimizer.state
        if not all(map(math.isfinite, self._trainer.scheduled_lrs())):
            return False
        return all(p.grad is None or state.get(p) for group in groups if group.get("momentum") for p in group["params"])

    def settle(self) -> bool:
        """Read the numbers of all pending steps in one transfer; judge, learn and tell, in their order.

        True: one of them made the run go back to an earlier state.
        """
        pending, self._pending = self._pending, []
        num_committed = 0
        is_undone = False
        steps = iter(self._read(pending))
        try:
            for each, was_bad, values in steps:
                view = self._last_view = self._view(each, values)
                if is_undone:
                    self.tell_undone(view)
                    continue
                decision = self._decide(view, was_bad, each.lr_scale)
                if decision.action is Action.COMMIT:
                    num_committed += 1
                    self._committed(each, view, decision)
                else:
                    is_undone = self._refused(each, view, decision, was_bad)  # that has put the schedule right, too
        except BaseException:
            for step in steps:  # the run ends; these were done all the same
                self._record(*step)
            raise
        if num_committed < len(pending) and not is_undone:
            self._redo_schedule(num_committed)
        return is_undone

    def _read(self, pending: Sequence[Pending]) -> list[tuple[Pending, bool, dict[str, Any]]]:
        if not pending:
            return []
        flags = torch.stack([each.bad for each in pending]).to(pending[0].measurement.vector.dtype)
        numbers = torch.cat([flags, *(each.measurement.vector for each in pending)]).tolist()
        start, read = len(pending), []
        for each, was_bad in zip(pending, numbers[: len(pending)], strict=True):
            end = start + each.measurement.vector.numel()
            read.append((each, bool(was_bad), each.measurement.unpack(numbers[start:end])))
            start = end
        return read

    def _view(self, each: Pending, values: dict[str, Any]) -> StepView:
        trainer = self._trainer
        return StepView(**each.view_fields, **values, **trainer.run.history(False), bad_state=trainer.audit.bad_state)

    def _committed(self, each: Pending, view: StepView, decision: Decision) -> None:
        trainer = self._trainer
        trainer._remember_good(each.window, view.loss)
        trainer.committed(view, decision)
        refusals = [(name, verdict) for name, verdict in decision.verdicts.items() if verdict.action is Action.SKIP]
        if refusals:
            late = (
                f"the step was applied before its numbers were read (loop.host_read_every={self._every}), so it could not be "
                "skipped; only what is not finite is skipped in time"
            )
            incident = trainer.run.open_incident(view, merge(refusals))
            incident.decision.action = str(Action.COMMIT)
            incident.decision.reasons = [*incident.decision.reasons, late]
            trainer.run.keep(incident)
            trainer.on_incident(incident)

    @torch.no_grad()
    def _refused(self, each: Pending, view: StepView, decision: Decision, was_bad: bool) -> bool:
        trainer = self._trainer
        if decision.action is Action.STOP and not was_bad:  # the weights have it in them
            trainer.run.stepped(view, decision, "commit")
            told = Verdict(
                reason=f"the step was applied before its numbers were read (loop.host_read_every={self._every})"
            )
            decision = merge([*decision.verdicts.items(), ("loop", told)])
            trainer.resolve_between_steps(view, decision)
        for tensor, value in each.batch:
            tensor.copy_(value)
        action = trainer.refused(view, decision, each.window, each.random_state, is_late=True)
        return action is Action.ROLLBACK

    def _record(self, each: Pending, was_bad: bool, values: dict[str, Any]) -> None:
        """What was done on the device, when nobody is asked any more."""
        action = Action.SKIP if was_bad else Action.COMMIT
        verdict = Verdict(action, reason="done on the device; the run ended before its numbers were judged")
        trainer = self._trainer
        trainer.run.stepped(self._view(each, values), merge([("loop", verdict)]), str(action))

    def tell_undone(self, view: StepView) -> None:
        """A step was computed with weights that a rollback has taken away."""
        trainer = self._trainer
        trainer.run.stepped(view, merge([("loop", UNDONE)]), "rollback")

    def _next_lr_scale(self) -> float:
        view = self._last_view
        assert view is not None
        after = dataclasses.replace(view, step=view.step + 1, **self._trainer.run.history(False))
        return merge((guard.name, guard.verdict(after)) for guard in self._trainer.guards).lr_scale

    def state_dict(self) -> dict[str, Any]:
        return {"lr_scale": self._lr_scale, "num_since_scale": self._num_since_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lr_scale, self._num_since_scale = state["lr_scale"], state["num_since_scale"]

    def _decide(self, view: StepView, was_bad: bool, lr_scale: float) -> Decision:
        """What was done on the device, with the guards' reasons; it is too late to skip, but not to go back or to stop."""
        decision = self._trainer._judge(view).undoubted  # a doubt is settled by a look at the step, which is gone
        if was_bad and decision.action is Action.COMMIT:
            reason = "the loss, the gradient norm or a buffer is not finite; the update was skipped on the device"
            verdict = Verdict(Action.SKIP, reason=reason, evidence={"signal": "loss", "value": view.loss})
            return Decision(Action.SKIP, lr_scale, {**decision.verdicts, "loop": verdict})
        if not was_bad and decision.action is Action.SKIP:
            return Decision(Action.COMMIT, lr_scale, decision.verdicts)
        return Decision(decision.action, lr_scale, decision.verdicts)

    def _remember_schedule(self) -> None:
        scheduler, groups = self._trainer.scheduler, self._trainer.optimizer.param_groups
        if scheduler is not None:
            # Not only the learning rate: some schedules move the momentum too.
            settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            self._schedule = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(settings)

    def _redo_schedule(self, num_committed: int) -> None:
        """The schedule as it is after the committed steps only."""
        if self._schedule is None:
            return
        state, settings = self._schedule
        self._trainer.scheduler.load_state_dict(state)
        for group, values in zip(self._trainer.optimizer.param_groups, settings, strict=False):
            for key, value in values.items():
                if isinstance(group[key], Tensor):
                    group[key].copy_(
                        value
                    )  # it may be shared with a captured graph, and the scheduler fills it in place
                else:
                    group[key] = value
        for _ in range(num_committed):
            self._trainer.advance_schedule()
