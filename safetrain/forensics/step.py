"""What an investigation is given: the step that went wrong, and how much may be spent on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.incident import Origin
from ..errors import UsageError
from ..precision import islands
from ..precision.autocast import AUTOCAST_DTYPES
from ..tensors.rng import RandomState


@dataclass(frozen=True)
class Step:
    """A step to replay. What is None is taken as it is now.

    >>> micro_batches = [torch.rand(2, 4), torch.rand(2, 4)]
    >>> step = Step(torch.nn.Linear(4, 1), lambda model, x: model(x).mean(), micro_batches, precision="bf16")
    """

    model: nn.Module
    """Wrapped or not: DistributedDataParallel is unwrapped, a compiled model is replayed in eager mode."""
    loss_fn: Callable[[Any, Any], Any]
    """`loss_fn(model, batch)` gives the loss, or a mapping with "loss"."""
    window: Sequence[Any]
    """The micro-batches of the step, in order; one for a step without gradient accumulation."""
    optimizer: Optimizer | None = None
    """Given: its step is tried on the gradients too. Bad gradients that it copes with are no incident then."""
    precision: str = "fp32"
    loss_scale: float = 1.0
    random_state: RandomState | None = None
    """As it was before the step."""
    buffers: Mapping[str, Tensor] | None = None
    """Values of the model's buffers before the step, by name."""
    loss: Tensor | float | None = None
    """What the step's loss was (the mean over the window), to compare the replay with."""

    def __post_init__(self) -> None:
        if self.precision not in AUTOCAST_DTYPES:
            raise UsageError(
                f"precision is {self.precision!r}.\nTo fix: use one of {', '.join(map(repr, AUTOCAST_DTYPES))}."
            )

    def autocast(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around a forward pass of the (unwrapped) model; a loss that is kept in float32 stays so."""
        device = next((p.device.type for p in model.parameters()), "cpu")
        return islands.autocast(model, device, AUTOCAST_DTYPES[self.precision])


@dataclass(frozen=True)
class Effort:
    """How much an investigation may spend. One replay costs about a plain step.

    >>> quick = Effort(remedies=False, samples=False)  # the operation, its line and its cause
    """

    remedies: bool = True
    is_known: Callable[[Origin], bool] = lambda origin: False
    """Remedies are not tried again for an origin for which this returns True."""
    samples: bool = True
    lineage: bool = True
    """Say where the fatal value came from, for one more replay. Not with neither samples nor remedies."""
    anomaly: bool = False
    """Also replay the step in autograd's anomaly mode, and report its message."""
    max_replays: int = 64
    """Upper bound on the replays that search samples and try remedies."""
    max_seconds: float | None = None
    """No further replay begins after this time: half of it is for the samples, the rest for lineage and remedies. The operation and
    its cause are found in any case, for about three replays."""
