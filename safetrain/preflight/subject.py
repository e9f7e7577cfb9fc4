"""What the checks share: the trainer, a sample of its data, and observations of its first steps, each computed once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.loss import split_loss
from ..forensics.replay import fresh
from ..guards import Guard
from .observer import LossCall, Observer
from .outcome import Unavailable
from .sample import CannotRead, Read, Sample
from .scan import Field, Scan, scan
from .untouched import Untouched

if TYPE_CHECKING:
    from ..trainer.trainer import SafeTrainer

NONE_FINITE = "none of the first batches gives a finite loss and finite gradients, see finite_steps"
NUM_FIRST = 4
"""Batches at the start of the run whose steps are observed."""
GRACE = 1.2
"""Checks still start until this multiple of the budget is spent, because most need little time."""


class Budget:
    """Seconds for all checks together; a long check takes a share of them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        return GRACE * self.seconds - self.spent

    def deadline(self, share: float) -> float:
        """On the clock of `time.perf_counter`: the end of this share, or of the whole budget if that is sooner."""
        return min(time.perf_counter() + share * self.seconds, self._begin + self.seconds)


@dataclass
class Observation:
    observer: Observer
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """By parameter name, summed over the batches; None for one that the loss does not reach."""
    error: Exception | None = None
    num_samples: int = 0


class Subject:
    def __init__(
        self, trainer: SafeTrainer, budget: Budget, untouched: Untouched, guards: list[Guard] | None = None
    ) -> None:
        self.trainer, self.budget, self.untouched = trainer, budget, untouched
        self.guards = guards
        """Copies of the trainer's guards, not attached; None if they cannot be copied."""
        self.seconds_per_step = math.inf
        """Of a plain forward and backward pass, once one was measured."""
        self.model = trainer.model
        untouched.rewind()

    # ---- data ----------------------------------------------------------------------------------------------------

    @cached_property
    def sample(self) -> Sample:
        return Sample(self.trainer)

    @cached_property
    def first(self) -> list[Read]:
        """The first batches of a run."""
        found: list[Read] = []
        deadline = self.budget.deadline(0.1)
        try:
            with self.clean():
                for read in self.sample.batches(in_order=True):
                    found.append(Read(fresh(read.batch), read.position, read.ids))
                    if len(found) == NUM_FIRST or time.perf_counter() > deadline:
                        break
        except CannotRead as error:
            if not found:
                raise Unavailable(f"no batch can be read, see readable: {error}") from error
        if not found:
            raise Unavailable("the training data gives no batch, see readable")
        return found

    @cached_property
    def scan(self) -> Scan:
        """Statistics of the data, as much of it as can be read in 15% of the budget."""
        markers = self._markers()
        with self.clean():
            return scan(self.sample, markers, self.budget.deadline(0.15))

    @property
    def seen(self) -> dict[str, Any]:
        """How much of the data was read, for the numbers of an outcome."""
        return {"seen": self.scan.num_rows, "of": self.scan.num_samples}

    def fields(self) -> Iterable[tuple[str, Field]]:
        """What is known of each tensor of the batches, by its path; raises Unavailable if no sample was read."""
        if self.scan.num_rows == 0:
            raise Unavailable("no sample could be read, see readable")
        return self.scan.fields.items()

    def _markers(self) -> dict[str, set[int]]:
        """Padding and ignore indices, by the field they are in."""
        try:
            observer = self.observed.observer
        except Unavailable:
            return {}
        markers: dict[str, set[int]] = {}
        for call in observer.loss_calls:
            if call.field is not None and call.has_class_indices:
                markers.setdefault(call.field, set()).add(call.arguments["ignore_index"])
        for lookup in observer.lookups:
            if lookup.field is not None and lookup.padding_idx is not None:
                markers.setdefault(lookup.field, set()).add(lookup.padding_idx)
        return markers

    # ---- steps ---------------------------------------------------------------------------------------------------

    def forward(self, batch: Any, autocast: bool = True) -> Tensor:
        """The loss of a batch, which is copied first because a step may write to it."""
        with self.trainer.precision.autocast() if autocast else nullcontext():
            output = self.trainer.training_step(self.model, fresh(batch))
        return split_loss(output, "training_step")[0]

    @contextmanager
    def clean(self) -> Iterator[None]:
        """On exit, everything is restored to its state before the first step."""
        try:
            yield
        finally:
            self.untouched.rewind()

    @cached_property
    def observed(self) -> Observation:
        """The first batches with the initial weights, in float32: the same magnitudes, but nothing overflows."""
        precision = self.trainer.precision
        observer = Observer(self.model, precision.host_loss_scale() if precision.name == "fp16" else 65536.0)
        seen = Observation(observer)
        batches = self._finite or self.first
        with self.clean():
            try:
                deadline = self.budget.deadline(0.06)
                with observer:
                    for read in batches:
                        if seen.losses and time.perf_counter() > deadline:
                            break
                        observer.begin(batch := fresh(read.batch))
                        loss = split_loss(self.trainer.training_step(self.model, batch), "training_step")[0]
                        seen.losses.append(float(loss.detach()))
                        if loss.requires_grad:
                            torch.autograd.backward(loss)
                        seen.num_samples += read.size
            except Exception as error:
                seen.error = error
            names = {id(p): name for name, p in self.model.named_parameters()}
            for group in self.trainer.optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    name = names.get(id(parameter), f"(outside the model).{index}")
                    seen.gradients[name] = None if parameter.grad is None else parameter.grad.detach()
        return seen

    @property
    def steps(self) -> Observation:
        """Like `observed`, for checks that need complete finite steps; raises Unavailable without them."""
        if self.observed.error is not None:
            raise Unavailable(f"the step raises {type(self.observed.error).__name__}, see finite_steps")
        if not self._finite:
            raise Unavailable(NONE_FINITE)
        return self.observed

    @property
    def loss_calls(self) -> list[LossCall]:
        return self.observed.observer.loss_calls

    def clear_gradients(self) -> None:
        for parameter in self.trainer.stepper.parameters:
            parameter.grad = None

    @cached_property
    def _finite(self) -> list[Read]:
        found: list[Read] = []
        deadline = self.budget.deadline(0.1)
        for read in self.first:
            if found and time.perf_counter() > deadline:
                break
            with self.clean():
                begin = time.perf_counter()
                try:
                    loss = self.forward(read.batch, autocast=False)
                    if not loss.requires_grad or not bool(torch.isfinite(loss)):
                        continue
                    torch.autograd.backward(loss)
                except Exception:
                    continue  # `finite_steps` reports it
                self.seconds_per_step = min(self.seconds_per_step, time.perf_counter() - begin)
                gradients = [p.grad for p in self.trainer.stepper.parameters if p.grad is not None]
                if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
                    found.append(read)
        return found

    @property
    def healthy(self) -> list[Read]:
        """First batches whose loss and gradients are finite, used for trial trainings."""
        if not self._finite:
            raise Unavailable(NONE_FINITE)
        return self._finite
