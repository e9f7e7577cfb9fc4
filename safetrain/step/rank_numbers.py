"""Reduces the numbers of a step over ranks: sent before backward, received after it, averaged for the guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.view import DeviceStep
from ..distributed.agreement import (
    HEAD,
    Layout,
    RankReports,
    RankState,
    RankStatus,
    Row,
    Values,
    largest_over,
    mean_over,
    names_in,
    tallied,
)
from ..distributed.comm import Link, PendingGather, name_ranks
from ..distributed.stragglers import Stragglers
from ..errors import RankError
from ..guards import Guard

if TYPE_CHECKING:
    from .exchange import RunStatus
    from .step import Step


class RankNumbers:
    """Guards that need no gradients are measured before backward, so that their numbers travel with the losses while backward
    runs. The others cost an exchange of their own."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.reports = RankReports([RankStatus(RankState.STEP)] * link.world_size)
        """What the ranks reported in the last attempt."""
        self.last_norm = 0.0
        self._stragglers = Stragglers(link.world_size)
        self._layout, self._late_layout = Layout(), Layout()
        self._sent: PendingGather | None = None
        self._values: Values = {}
        self._early_guards: list[Guard] = []
        self._late_guards: list[Guard] = []
        self._max_signals: set[str] = set()

    def begin_run(self, guards: Iterable[Guard]) -> None:
        measuring = [guard for guard in guards if type(guard).measure is not Guard.measure]
        self._early_guards = [guard for guard in measuring if _is_early(guard)]
        self._late_guards = [guard for guard in measuring if not _is_early(guard)]
        self._max_signals = {f"signal/{guard.name}." for guard in measuring if guard.over_ranks == "max"}

    def begin_attempt(self) -> None:
        self._sent, self._values = None, {}

    @property
    def are_sent(self) -> bool:
        return self._sent is not None

    def send(self, run: RunStatus, state: RankState, values: Values | None = None) -> None:
        """Begin to exchange them; without waiting."""
        self._values = values or {}
        unknown = self._layout.num_unknown(self._values)
        status = RankStatus(
            state,
            run.signal or 0,
            run.out_of_time,
            run.trail(),
            self.last_norm,
            bool(self._late_guards),
            unknown,
            run.stop_reason is not None,
        )
        seconds = self.link.watchdog.activity.take_own_seconds()
        self._sent = self.link.send(self._layout.pack(status, self._values, self.link.device, seconds))

    def receive(self, step: Step, norm: Tensor | None = None) -> float:
        """Wait for the others' numbers and keep them as `reports`; returns `norm` on the host. One read for all of it."""
        assert self._sent is not None
        return self._receive(step, self._sent, self._values, self._layout, norm)

    def early_values(
        self, step: Step, losses: Sequence[Tensor], metrics: Sequence[Mapping[str, Any]], window: Sequence[Any]
    ) -> Values:
        """All that is known before backward."""
        on_device = step.on_device(window, losses, torch.full((), math.nan, device=losses[0].device))
        values: dict[str, list[Tensor | float]] = {f"loss/{index}": [each] for index, each in enumerate(losses)}
        values |= _measured(self._early_guards, on_device)
        for each in metrics:
            for name, value in each.items():
                values.setdefault(f"metric/{name}", []).append(value)
        return values

    def means(self, num_losses: int) -> dict[str, Any]:
        """What was sent, over all ranks, by the names of `StepView`'s fields."""
        rows = self.reports.rows
        micro_losses = tuple(mean_over(rows, f"loss/{index}") for index in range(num_losses))
        return {
            "loss": sum(micro_losses) / num_losses,
            "micro_losses": micro_losses,
            "signals": self._signals(rows),
            "metrics": _named(rows, "metric/", lambda name: mean_over(rows, name)),
        }

    def late_signals(self, step: Step, on_device: DeviceStep) -> tuple[dict[str, float], Exception | None]:
        """What guards measure after backward. With an error of this rank's, if any: then `reports` say so on all ranks."""
        reports = self.reports
        if not reports.have_late_signals:
            return {}, None
        values: Values = {}
        error: Exception | None = None
        try:
            values = _measured(self._late_guards, on_device)
        except Exception as raised:
            error = raised
        status = replace(reports.statuses[self.link.rank], num_unknown=self._late_layout.num_unknown(values))
        if error is not None:
            status = replace(status, state=RankState.FATAL)
        sent = self.link.send(self._late_layout.pack(status, values, self.link.device))
        self._receive(step, sent, values, self._late_layout)
        later, self.reports = self.reports, reports
        if later.in_state(RankState.FATAL):
            self.reports = replace(reports, statuses=later.statuses)
            return {}, error
        return self._signals(later.rows), None

    def _receive(
        self, step: Step, sent: PendingGather, values: Values, layout: Layout, norm: Tensor | None = None
    ) -> float:
        self.link.watchdog.activity.at("wait for the numbers of the other ranks", waiting=True)
        matrix = sent.wait()
        self.link.watchdog.activity.at("decision")
        flat = matrix.flatten()
        numbers = (flat if norm is None else torch.cat([flat, norm.to(flat.dtype).reshape(1)])).cpu().numpy()
        table = numbers[: flat.numel()].reshape(matrix.shape)
        self.reports = layout.unpack(table)
        if norm is not None:
            for slow in self._stragglers.add(table[:, RankStatus.LENGTH : HEAD], monotonic()):
                self.link.watchdog.straggles(slow)
        if self.reports.have_unknown:
            rows = self.link.gather(tallied(values))
            layout.extend(name for row in rows for name in row)
            self.reports = replace(self.reports, rows=rows)
        if diverged := self.reports.diverged:
            raise RankError(
                f"the ranks have diverged before step {step.index}: {name_ranks(diverged)} made other decisions or had "
                "other gradients than rank 0.\nTo fix: look for what differs between ranks (a guard, a hook or a model that "
                "depends on the rank or on the local batch), then resume."
            )
        return float(numbers[-1]) if norm is not None else 0.0

    def _signals(self, rows: Sequence[Row]) -> dict[str, float]:
        def value(name: str) -> float:
            is_peak = any(name.startswith(prefix) for prefix in self._max_signals)
            return largest_over(rows, name) if is_peak else mean_over(rows, name)

        return _named(rows, "signal/", value)


def _measured(guards: Iterable[Guard], on_device: DeviceStep) -> dict[str, list[Tensor | float]]:
    return {
        f"signal/{guard.name}.{name}": [value] for guard in guards for name, value in guard.measure(on_device).items()
    }


def _named(rows: Sequence[Row], prefix: str, value: Callable[[str], float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value(name) for name in names_in(rows) if name.startswith(prefix)}


def _is_early(guard: Guard) -> bool:
    """Its numbers are known before backward. What a class says of its `measure` does not hold for one that overrides it."""
    measuring = next(cls for cls in type(guard).__mro__ if "measure" in vars(cls))
    return not vars(measuring).get("measures_backward", True)
