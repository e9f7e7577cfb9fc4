"""Steps whose numbers reach the host several at a time.

A fused optimizer skips a bad update on the device (`optimizer.found_inf`), so the host need not know yet. It learns up to
`loop.host_read_every` steps later, with the right step numbers. Until then the schedule runs as if every step had been
committed; it is put right when the numbers arrive.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import gradients
from .errors import UsageError
from .measure import Measurement
from .rng import RandomState
from .verdict import Action, Decision, Verdict, merge
from .view import Limits, StepView

if TYPE_CHECKING:
    from .trainer import SafeTrainer


@dataclass
class Pending:
    measurement: Measurement
    bad: Tensor
    view_fields: dict[str, Any]
    """What a view of the step needs that is known on the host already."""
    lr_scale: float
    window: Sequence[Any]
    random_state: RandomState


class DeferredCommits:
    def __init__(self, trainer: SafeTrainer) -> None:
        self._trainer = trainer
        self._every = trainer.config.loop.host_read_every
        self._pending: list[Pending] = []
        self._lr_scale = 1.0
        self._num_since_scale = 0
        """Steps since the guards were last asked for the learning-rate scale. Only `commit` counts them: bringing steps to
        the host sooner, before something is saved say, changes no number."""
        self._schedule: tuple[Any, list[Any]] | None = None
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

    def commit(self, measurement: Measurement, limits: Limits, window: Sequence[Any]) -> None:
        """Apply the step unless it is non-finite, decided on the device."""
        trainer, optimizer = self._trainer, self._trainer.optimizer
        if not self._pending:
            self._remember_schedule()
        view_fields = {"step": trainer.step, "lrs": trainer.scheduled_lrs(), "limits": limits}
        health = measurement.losses_and_norm().sum()
        if (buffer_peak := trainer.transaction.buffer_peak()) is not None:
            health = health + buffer_peak
        bad = ~torch.isfinite(health)
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
        random_state = trainer.transaction.random_state
        self._pending.append(Pending(measurement, bad, view_fields, self._lr_scale, window, random_state))
        self._num_since_scale += 1
        if self._num_since_scale >= self._every:
            self._num_since_scale = 0
            self._lr_scale = self._next_lr_scale(self.settle())

    def settle(self) -> StepView | None:
        """Read the numbers of all pending steps in one transfer; judge, learn and tell, in their order.

        Returns the last step's view, or None when there was nothing to read.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return None
        trainer = self._trainer
        flags = torch.stack([each.bad for each in pending]).to(pending[0].measurement.vector.dtype)
        numbers = torch.cat([flags, *(each.measurement.vector for each in pending)]).tolist()
        start = len(pending)
        num_committed = 0
        is_undone = False
        view = None
        for each, was_bad in zip(pending, numbers[: len(pending)], strict=True):
            end = start + each.measurement.vector.numel()
            values = each.measurement.unpack(numbers[start:end])
            start = end
            view = StepView(
                **each.view_fields, **values, **trainer.run.history(False), bad_state=trainer.audit.bad_state
            )
            if is_undone:
                verdict = Verdict(Action.ROLLBACK, reason="undone by the rollback of a step before it")
                trainer.run.stepped(view, merge([("loop", verdict)]), "rollback", trainer.stream.epoch)
                continue
            decision = self._decide(view, bool(was_bad), each.lr_scale)
            if decision.action is Action.COMMIT:
                num_committed += 1
                trainer._remember_good(each.window, view.loss)
                trainer.committed(view, decision)
            else:
                action = trainer.refused(view, decision, each.window, each.random_state, is_late=True)
                is_undone = action is Action.ROLLBACK  # that has put the schedule right, too
        if num_committed < len(pending) and not is_undone:
            self._redo_schedule(num_committed)
        return view

    def _next_lr_scale(self, view: StepView | None) -> float:
        assert view is not None
        after = dataclasses.replace(view, step=view.step + 1, **self._trainer.run.history(False))
        return merge((guard.name, guard.verdict(after)) for guard in self._trainer.guards).lr_scale

    def state_dict(self) -> dict[str, Any]:
        return {"lr_scale": self._lr_scale, "num_since_scale": self._num_since_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lr_scale, self._num_since_scale = state["lr_scale"], state["num_since_scale"]

    def _decide(self, view: StepView, was_bad: bool, lr_scale: float) -> Decision:
        """What was done on the device, with the guards' reasons; it is too late to skip, but not to go back or to stop."""
        decision = self._trainer._judge(view)
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
            self._schedule = copy.deepcopy(scheduler.state_dict()), [group["lr"] for group in groups]

    def _redo_schedule(self, num_committed: int) -> None:
        """The schedule as it is after the committed steps only."""
        if self._schedule is None:
            return
        state, lrs = self._schedule
        self._trainer.scheduler.load_state_dict(state)
        for group, lr in zip(self._trainer.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        for _ in range(num_committed):
            self._trainer.advance_schedule()
