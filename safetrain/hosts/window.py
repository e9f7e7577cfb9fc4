"""What the loop has done of the current step so far."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .settings import Kept


class Window:
    """A step that the loop is making."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.losses: list[Tensor] = []
        """What backward was called on, detached."""
        self.factors: list[float] = []
        """By what the loop has multiplied each of them."""
        self.num_blocks = 0
        self.before = 0, 0, 0
        """How many batches, losses and recorded calls there were before the last block."""
        self.outcome: str | None = None
        self.stepped: list[Optimizer] = []
        self.lr_scale = 1.0
        self.scaler: GradScaler | None = None
        """The loop's scaler, which is to forget this step."""
        self.is_done = False
        """Refused, or repaired and committed: what the loop still asks for in this step is left out."""
        self.kept: Kept | None = None
        """What the loop may move after a refusal, and must not."""

    @property
    def is_divided(self) -> bool:
        """The loop divides the loss of each micro-batch by their number."""
        count = len(self.losses)
        return count > 1 and all(abs(factor * count - 1.0) < 1e-3 for factor in self.factors)
