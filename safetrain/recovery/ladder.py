"""Climbs the ladder: the first rung that fits, is within its budget and helps resolves the step. It ends in a stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.schema import RecoveryConfig
from ..config.targets import import_target
from ..core.containment import is_contained
from ..core.spelling import suggest
from ..core.verdict import Action
from ..errors import ConfigError
from .refused_step import RefusedStep, Resolution
from .repairs import Repairs
from .rungs import RUNGS, Rung


class Ladder:
    def __init__(self, config: RecoveryConfig, rungs: Sequence[Rung] | None = None) -> None:
        self.config = config
        self.rungs = [make_rung(name) for name in config.ladder] if rungs is None else list(rungs)
        self.spent: dict[str, list[int]] = {}
        """The steps at which each rung was climbed, by the name of its budget; never rewound by a rollback."""
        self.refused: list[int] = []
        """The steps that were refused."""

    def resolve(self, case: RefusedStep, repairs: Repairs) -> Resolution:
        """What was done about a refused step. Every rung that was passed over for a reason says so."""
        notes: list[str] = []
        if case.decision.action is Action.STOP:
            return Resolution(Action.STOP)
        for rung in self.rungs:
            if not self._allowed(rung) or not self._fits(rung, case, repairs):
                continue
            budget = rung.budget(self.config)
            if self._num_spent(rung, case.view.step) >= budget:
                notes.append(f"{rung.name}: its budget of {budget} is spent")
                continue
            outcome = self._climbed(rung, case, repairs)
            if isinstance(outcome, Resolution) or rung.failures_count:
                self.spent.setdefault(rung.budget_name, []).append(case.view.step)
            if isinstance(outcome, Resolution):
                reasons = [*notes, *(f"{rung.name}: {reason}" for reason in outcome.reasons)]
                return self._bounded(replace(outcome, reasons=reasons), case.view.step)
            notes.append(f"{rung.name}: {outcome}")
        return Resolution(Action.STOP, [*notes, "recovery: nothing is left to try"])

    def _fits(self, rung: Rung, case: RefusedStep, repairs: Repairs) -> bool:
        try:
            return rung.fits(case)
        except Exception as error:
            what = f"the rung {rung.name}, in fits"
            if not repairs.runs_alone or not is_contained(error, rung, what, "the next one is tried"):
                raise
            return False

    def _climbed(self, rung: Rung, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        """What a rung made of it. One that is broken is passed over, with the step undone as before it."""
        try:
            return rung.climb(case, repairs)
        except Exception as error:
            if not repairs.runs_alone or not is_contained(
                error, rung, f"the rung {rung.name}", "the next one is tried"
            ):
                raise
            repairs.undo()
            return f"it failed ({type(error).__name__}: {error})"

    def _bounded(self, outcome: Resolution, step: int) -> Resolution:
        """Refusals are bounded, and nothing bad is accepted when the budget is spent."""
        if outcome.action is Action.COMMIT:
            return outcome
        self.refused = [*self._recent(self.refused, step), step]
        limit = self.config.max_refusals
        if len(self.refused) <= limit:
            return outcome
        span = self.config.budget_steps
        where = "this run" if span is None or step < span else f"the last {span} steps (recovery.budget_steps)"
        reason = f"recovery: {len(self.refused)} refused steps in {where}, recovery.max_refusals is {limit}"
        return Resolution(Action.STOP, [*outcome.reasons, reason])

    def may_climb(self, name: str, step: int) -> bool:
        """Whether a rung is on this ladder and within its budget."""
        return any(r.name == name and self._num_spent(r, step) < r.budget(self.config) for r in self.rungs)

    def _num_spent(self, rung: Rung, step: int) -> int:
        steps = self.spent.get(rung.budget_name, [])
        if steps and not rung.lasts:
            steps = self.spent[rung.budget_name] = self._recent(steps, step)
        return len(steps)

    def _recent(self, steps: list[int], step: int) -> list[int]:
        span = self.config.budget_steps
        return steps if span is None else [each for each in steps if each > step - span]

    def _allowed(self, rung: Rung) -> bool:
        is_ours = type(rung) in RUNGS.values()  # a user's own rung is allowed by being listed
        return not (rung.changes_the_computation and is_ours) or rung.name in self.config.heal

    def state_dict(self) -> dict[str, Any]:
        return {"spent": {name: list(steps) for name, steps in self.spent.items()}, "refused": list(self.refused)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.spent = {name: list(steps) for name, steps in state["spent"].items()}
        self.refused = list(state["refused"])


def make_rung(name: str) -> Rung:
    """One of ours by its name, or the user's by `package.module.Class` or `file.py:Class`."""
    if name in RUNGS:
        return RUNGS[name]()
    if "." not in name:
        raise ConfigError(f"recovery.ladder: unknown rung {name!r}{suggest(name, RUNGS)}")
    found = import_target(name)
    if not (isinstance(found, type) and issubclass(found, Rung)):
        raise ConfigError(
            f"recovery.ladder: {name!r} is not a rung; make it a subclass of safetrain.recovery.Rung with fits and climb"
        )
    return found()
