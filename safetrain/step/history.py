"""What guards see of the steps before this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

COUNTERS = ("consecutive_refusals", "consecutive_overflows", "num_refusals", "num_restarts")
HISTORIES = ("refused_steps", "dynamics_steps", "rollback_steps")


class History:
    """Counters of decided steps. Guards see them in the next `StepView`."""

    def __init__(self) -> None:
        self.step = 0
        """Index of the step to attempt next; refused steps count."""
        self.epoch = 0
        self.consecutive_refusals = 0
        self.consecutive_overflows = 0
        self.num_refusals = 0
        self.num_restarts = 0
        self.refused_steps: deque[int] = deque(maxlen=1000)
        self.dynamics_steps: deque[int] = deque(maxlen=1000)
        self.rollback_steps: deque[int] = deque(maxlen=1000)
        self.total_steps: int | None = None
        """Steps that the run will take, if that is known."""
        self.lr_shares: dict[int, float] = {}
        """The share of the learning rate that a trial found best, by the step of `dynamics_steps`."""
        self.restart_shares: list[float | None] = []
        """The share of the learning rate that a trial found best, of each restart; None where none was tried."""
        self.guard_seconds = 0.0
        """Spent by this process on what guards do in each step."""

    def view_fields(self, scaler_overflow: bool = False) -> dict[str, Any]:
        """Fields of the next step's `StepView`."""
        return {
            "consecutive_refusals": self.consecutive_refusals,
            "refused_steps": self.refused_steps,
            "dynamics_steps": self.dynamics_steps,
            "rollback_steps": self.rollback_steps,
            "lr_shares": self.lr_shares,
            "num_restarts": self.num_restarts,
            "restart_shares": self.restart_shares,
            "total_steps": self.total_steps,
            "consecutive_overflows": self.consecutive_overflows + 1 if scaler_overflow else 0,
        }

    def decided(self, step: int, outcome: str) -> None:
        """Count one decided step: `outcome` is the action taken, or `overflow`."""
        self.step += 1
        if outcome == "overflow":
            self.consecutive_overflows += 1
        elif outcome == "commit":
            self.consecutive_overflows = self.consecutive_refusals = 0
        else:
            self.consecutive_refusals += 1
            self.num_refusals += 1
            self.refused_steps.append(step)

    def went_wrong(self, step: int, lr_share: float | None) -> None:
        """The training dynamics were at fault. `lr_share`: see `lr_shares`."""
        self.dynamics_steps.append(step)
        if lr_share is not None:
            self.lr_shares[step] = lr_share

    def restarted(self, shares: Sequence[float | None]) -> None:
        """Training starts again from the beginning, with the rate lowered by each of these shares (None: by the usual one)."""
        self.num_restarts += len(shares)
        self.restart_shares += shares

    def rolled_back(self) -> None:
        self.consecutive_refusals = self.consecutive_overflows = 0
        self.refused_steps.clear()

    def state_dict(self) -> dict[str, Any]:
        """Without the step, which is the number of recorded losses."""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            **{name: list(getattr(self, name)) for name in HISTORIES},
            "lr_shares": [list(item) for item in self.lr_shares.items()],
            "restart_shares": list(self.restart_shares),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        self.step = step
        for name in COUNTERS:
            setattr(self, name, state[name])
        for name in HISTORIES:
            getattr(self, name).extend(state[name])
        self.lr_shares = {int(step): float(share) for step, share in state.get("lr_shares", [])}
        self.restart_shares = list(state.get("restart_shares", [None] * self.num_restarts))
