"""Climbs the ladder: the first rung that fits, is within its budget and helps settles the case. It ends in a stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.schema import RecoveryConfig
from ..config.spelling import suggest
from ..config.targets import import_target
from ..errors import ConfigError
from ..verdict import Action
from .case import Bench, Case, Settlement
from .rungs import RUNGS, Rung


class Ladder:
    def __init__(self, config: RecoveryConfig, rungs: Sequence[Rung] | None = None) -> None:
        self.config = config
        self.rungs = [make_rung(name) for name in config.ladder] if rungs is None else list(rungs)
        self.spent: Counter[str] = Counter()
        """How often each rung was climbed, by its purse; never rewound by a rollback."""
        self.num_refused = 0

    def settle(self, case: Case, bench: Bench) -> Settlement:
        """What was done about a refused step. Every rung that was passed over for a reason says so."""
        notes: list[str] = []
        if case.decision.action is Action.STOP:
            return Settlement(Action.STOP)
        for rung in self.rungs:
            if not self._allowed(rung) or not rung.fits(case):
                continue
            budget = rung.budget(self.config)
            if self.spent[rung.purse] >= budget:
                notes.append(f"{rung.name}: its budget of {budget} is spent")
                continue
            outcome = rung.climb(case, bench)
            if isinstance(outcome, Settlement) or rung.failures_count:
                self.spent[rung.purse] += 1
            if isinstance(outcome, Settlement):
                reasons = [*notes, *(f"{rung.name}: {reason}" for reason in outcome.reasons)]
                return self._bounded(replace(outcome, reasons=reasons))
            notes.append(f"{rung.name}: {outcome}")
        return Settlement(Action.STOP, [*notes, "recovery: nothing is left to try"])

    def _bounded(self, outcome: Settlement) -> Settlement:
        """Refusals are bounded over the run, and nothing bad is accepted when the budget is spent."""
        if outcome.action is Action.COMMIT:
            return outcome
        self.num_refused += 1
        limit = self.config.max_refusals
        if self.num_refused <= limit:
            return outcome
        reason = f"recovery: {self.num_refused} refused steps in this run, recovery.max_refusals is {limit}"
        return Settlement(Action.STOP, [*outcome.reasons, reason])

    def may_climb(self, name: str) -> bool:
        """Whether a rung is on this ladder and within its budget."""
        return any(rung.name == name and self.spent[rung.purse] < rung.budget(self.config) for rung in self.rungs)

    def _allowed(self, rung: Rung) -> bool:
        is_ours = type(rung) in RUNGS.values()  # who puts one of their own on the ladder has allowed it
        return not (rung.changes_the_computation and is_ours) or rung.name in self.config.heal

    def state_dict(self) -> dict[str, Any]:
        return {"spent": dict(self.spent), "num_refused": self.num_refused}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.spent, self.num_refused = Counter(state["spent"]), state["num_refused"]


def make_rung(name: str) -> Rung:
    """One of ours by its name, or the user's by `package.module.Class` or `file.py:Class`."""
    if name in RUNGS:
        return RUNGS[name]()
    if "." not in name:
        raise ConfigError(f"recovery.ladder: unknown rung {name!r}{suggest(name, RUNGS)}")
    found = import_target(name)
    if not (isinstance(found, type) and issubclass(found, Rung)):
        raise ConfigError(
            f"recovery.ladder: {name!r} is not a rung; let it be a subclass of safetrain.recovery.Rung with fits and climb"
        )
    return found()
