"""Steps whose numbers reach the host several at a time.

A fused optimizer skips a bad update on the device (`optimizer.found_inf`), so the host need not know yet. It learns up to
`loop.host_read_every` steps later, with the right step numbers. Until then the schedule runs as if every step had been
committed; it is corrected when the numbers arrive.

All that the device can decide is whether a number is finite. A step that needs more is judged on the host at once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._private import fused
from ..core.verdict import Action, Decision, Doubt, Verdict, merge
from ..core.view import StepView
from ..errors import UsageError
from ..tensors.rng import RandomState
from .measurement import Measurement
from .step import Step


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


UNDONE = merge([("loop", Verdict(Action.ROLLBACK, reason="undone by the rollback of a step before it"))])


class Late(NamedTuple):
    """A step whose numbers have reached the host."""

    view: StepView
    decision: Decision
    pending: Pending
    was_bad: bool
    """The device skipped its update."""
    why_applied: str
    """For people: why a refusal comes too late."""


class Deferral:
    """What is done with steps whose numbers arrive is up to the caller: see `settle`. With `every` 1 nothing is deferred."""

    def __init__(self, step: Step, every: int) -> None:
        self._step, self._every = step, every
        self._pending: list[Pending] = []
        self._lr_scale = 1.0
        self._num_since_scale = 0
        """Steps since the guards were last asked for the learning-rate scale. Only `apply_if_decidable` counts them: bringing steps to
        the host sooner, before something is saved say, changes no number."""
        self._schedule: tuple[Any, list[dict[str, Any]]] | None = None
        self._last_view: StepView | None = None
        self._why_applied = f"the step was applied before its numbers were read (loop.host_read_every={every})"
        self.is_on = every > 1
        if self.is_on:
            self._check()
            step.stateful["deferred"] = self

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def _check(self) -> None:
        optimizer = self._step.optimizer
        fix = "To fix: set loop.host_read_every=1."
        fused.SKIP.require(to_fix="set loop.host_read_every=1.")
        if not fused.can_skip(optimizer):
            raise UsageError(
                f"loop.host_read_every={self._every} needs an optimizer that can skip a bad update on the device, and "
                f"{type(optimizer).__name__} was not made with fused=True.\nTo fix: use torch.optim.AdamW (or Adam, SGD) with "
                "fused=True, or set loop.host_read_every=1."
            )
        if self._step.precision.name == "fp16":
            raise UsageError(f"loop.host_read_every={self._every} does not work with the fp16 loss scaler.\n{fix}")
        if self._step.exchange.world_size > 1:
            raise UsageError(
                f"loop.host_read_every={self._every} does not work with several processes: they agree on each step before it is "
                f"applied.\n{fix}"
            )
        for guard in self._step.guards:
            if getattr(guard.config, "drop_micro_batch", False):
                raise UsageError(
                    f"loop.host_read_every={self._every} and guards.{guard.name}.drop_micro_batch exclude each other: a bad "
                    f"window is known too late to try it again.\n{fix}"
                )

    def close(self, undone: Callable[[StepView, Decision, str], None] | None) -> None:
        """`undone`: given if the run ended in an error, and pending steps are only to be recorded."""
        if undone is not None:
            pending, self._pending, self._step.num_pending = self._pending, [], 0
            self._record(self._read(pending), undone)
        fused.skip_nothing(self._step.optimizer)

    def apply_if_decidable(self, window: Sequence[Any], measurement: Measurement) -> bool:
        """Apply the step unless it is non-finite, decided on the device. False: it must be judged on the host."""
        step = self._step
        if not self._can_decide_on_device():
            return False
        if not self._pending:
            self._remember_schedule()
        known = {
            "step": step.index,
            "epoch": step.history.epoch,
            "lrs": step.schedule.lrs,
            "limits": measurement.limits,
        }
        bad = ~torch.isfinite(measurement.losses_and_norm()).all()
        if (buffer_peak := step.transaction.buffer_peak()) is not None:
            bad = bad | ~torch.isfinite(buffer_peak)
        fused.skip_where(step.optimizer, bad)
        step.update(measurement, None, self._lr_scale)
        step.transaction.restore_where(bad)
        step.advance(refused=bad)
        transaction = step.transaction
        pending = Pending(
            measurement, bad, known, self._lr_scale, window, transaction.random_state, transaction.batch_before()
        )
        self._pending.append(pending)
        step.num_pending += 1
        self._num_since_scale += 1
        return True

    def settle_if_full(
        self,
        committed: Callable[[Late], None],
        refused: Callable[[Late], Action],
        undone: Callable[[StepView, Decision, str], None],
    ) -> None:
        """`settle` when there are `every` steps, and let the guards choose the next learning-rate scale."""
        if self._num_since_scale >= self._every:
            self._num_since_scale = 0
            self.settle(committed, refused, undone)
            self._lr_scale = self._next_lr_scale()

    def _can_decide_on_device(self) -> bool:
        """A non-finite learning rate is known on the host and is not checked on the device. The momentum of SGD is made
        in a parameter's first step, out of uninitialised memory if that step is skipped on the device."""
        groups, state = self._step.optimizer.param_groups, self._step.optimizer.state
        if not all(map(math.isfinite, self._step.schedule.lrs)):
            return False
        return all(p.grad is None or state.get(p) for group in groups if group.get("momentum") for p in group["params"])

    def settle(
        self,
        committed: Callable[[Late], None],
        refused: Callable[[Late], Action],
        undone: Callable[[StepView, Decision, str], None],
    ) -> bool:
        """Read the numbers of all pending steps in one transfer, and give them to the functions in their order.

        `refused` returns what was done about the step. `undone` is for steps that are no longer judged, with their outcome:
        those after a rollback, and all that are left when the run ends. True: one of them caused a rollback.
        """
        pending, self._pending, self._step.num_pending = self._pending, [], 0
        num_committed = 0
        went_back = False
        steps = iter(self._read(pending))
        try:
            for each, was_bad, values in steps:
                view = self._last_view = self._view(each, values)
                if went_back:
                    undone(view, UNDONE, "rollback")
                    continue
                decision = self._decide(view, was_bad, each.lr_scale)
                late = Late(view, decision, each, was_bad, self._why_applied)
                if decision.action is Action.COMMIT:
                    num_committed += 1
                    committed(late)
                else:  # going back puts the schedule right, too
                    for tensor, value in each.batch:
                        with torch.no_grad():
                            tensor.copy_(value)
                    action = refused(late)
                    went_back = action is Action.ROLLBACK
                    num_committed += action is Action.COMMIT
        except BaseException:
            self._record(steps, undone)
            raise
        if num_committed < len(pending) and not went_back:
            self._redo_schedule(num_committed)
        return went_back

    def _record(
        self,
        steps: Iterable[tuple[Pending, bool, dict[str, Any]]],
        undone: Callable[[StepView, Decision, str], None],
    ) -> None:
        for each, was_bad, values in steps:
            action = Action.SKIP if was_bad else Action.COMMIT
            verdict = Verdict(action, reason="done on the device; the run ended before its numbers were judged")
            undone(self._view(each, values), merge([("loop", verdict)]), str(action))

    def _read(self, pending: Sequence[Pending]) -> list[tuple[Pending, bool, dict[str, Any]]]:
        if not pending:
            return []
        flags = torch.stack([each.bad for each in pending]).to(pending[0].measurement.vector.dtype)
        numbers = torch.cat([flags, *(each.measurement.vector for each in pending)]).tolist()
        start, read = len(pending), []
        for each, was_bad in zip(pending, numbers[: len(pending)], strict=True):
            end = start + each.measurement.vector.numel()
            values = each.measurement.unpack(numbers[start:end])
            values.pop("rates", None)  # `view_fields` has them
            read.append((each, bool(was_bad), values))
            start = end
        return read

    def _view(self, each: Pending, values: dict[str, Any]) -> StepView:
        step = self._step
        return StepView(**each.view_fields, **values, **step.history.view_fields(), bad_state=step.audit.bad_state)

    def _next_lr_scale(self) -> float:
        view = self._last_view
        assert view is not None
        after = dataclasses.replace(view, step=view.step + 1, **self._step.history.view_fields())
        return merge((guard.name, guard.verdict(after)) for guard in self._step.guards).lr_scale

    def state_dict(self) -> dict[str, Any]:
        return {"lr_scale": self._lr_scale, "num_since_scale": self._num_since_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lr_scale, self._num_since_scale = state["lr_scale"], state["num_since_scale"]

    def _decide(self, view: StepView, was_bad: bool, lr_scale: float) -> Decision:
        """What was done on the device, with the guards' reasons; it is too late to skip, but not to go back or to stop."""
        # Other doubts need the step itself, which is over.
        decision = self._step.judge(view).doubted_only_by(Doubt.BRANCHES, Doubt.DEAD)
        if was_bad and decision.action is Action.COMMIT:
            reason = "the loss, the gradient norm or a buffer is not finite; the update was skipped on the device"
            verdict = Verdict(Action.SKIP, reason=reason, evidence={"signal": "loss", "value": view.loss})
            return Decision(Action.SKIP, lr_scale, {**decision.verdicts, "loop": verdict})
        if not was_bad and decision.action is Action.SKIP:
            return Decision(Action.COMMIT, lr_scale, decision.verdicts)
        return Decision(decision.action, lr_scale, decision.verdicts)

    def _remember_schedule(self) -> None:
        scheduler, groups = self._step.schedule.scheduler, self._step.optimizer.param_groups
        if scheduler is not None:
            # Not only the learning rate: some schedules move the momentum too.
            settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            self._schedule = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(settings)

    def _redo_schedule(self, num_committed: int) -> None:
        """The schedule as it is after the committed steps only."""
        if self._schedule is None:
            return
        state, settings = self._schedule
        self._step.schedule.load_state_dict(state)
        for group, values in zip(self._step.optimizer.param_groups, settings, strict=False):
            for key, value in values.items():
                if isinstance(group[key], Tensor):
                    group[key].copy_(
                        value
                    )  # it may be shared with a captured graph, and the scheduler fills it in place
                else:
                    group[key] = value
        for _ in range(num_committed):
            self._step.schedule.step()
