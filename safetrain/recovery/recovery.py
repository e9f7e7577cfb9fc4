"""What happens to a refused step: find out why, then climb the ladder until a rung helps. It ends in a stop at the latest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.policy import CheckpointPolicy
from ..config.schema import Config
from ..data.quarantine import Quarantine
from ..data.stream import BatchStream
from ..guards.islands import Islands
from ..step.step import Step
from .investigation import Investigator, RunRecord
from .ladder import Ladder
from .last_good import LastGood
from .refused_step import RefusedStep, Resolution
from .repairs import Repairs


class Recovery:
    """Calls down only: to the step, which it may retry, and to the checkpoints, which it may go back to."""

    def __init__(
        self,
        config: Config,
        ladder: Ladder,
        step: Step,
        checkpoints: CheckpointPolicy,
        stream: BatchStream,
        run: RunRecord,
    ) -> None:
        self.ladder = ladder
        self._step, self._stream, self._run = step, stream, run
        self.repairs = Repairs(step, checkpoints)
        self.investigator = Investigator(config.forensics, step, run)
        after = config.recovery.quarantine_after if "samples" in config.recovery.heal else None
        self.quarantine = Quarantine(after, run.dir)

    def resolve(self, case: RefusedStep) -> Resolution | None:
        """What was done about a step that was attempted and undone; None if it was refused without need, and is committed."""
        good = self.repairs.last_good
        case.nothing_learned = good is not None and good.nothing_learned
        case.may_restart = self.ladder.may_climb("restart", case.view.step)
        self.investigator.investigate(case)
        self._step.transaction.restore(replayed=True)
        if (warnings := self.repairs.accept_if_harmless(case)) is not None:
            for text in warnings:
                self._run.warn(text)
            return None
        self.investigator.keep_replay(case)
        return self._climb(case)

    def resolve_bad_state(self, case: RefusedStep) -> Resolution:
        """What was done about a state that was found to be wrong between two steps."""
        self.investigator.describe_state(case)
        return self._climb(case)

    def _climb(self, case: RefusedStep) -> Resolution:
        return self._count_samples(case, self.ladder.resolve(case, self.repairs))

    def _count_samples(self, case: RefusedStep, resolution: Resolution) -> Resolution:
        """Note which samples of the data set the incident is about; those that come again and again are left out later."""
        stream = self._stream
        if case.is_late or not case.is_step or (ids := stream.ids(case.window)) is None:
            return resolution
        own = [ids[index][sample] for index, samples in case.guilty_samples.items() for sample in samples]
        guilty = [sample for each in self._step.exchange.gather(own) for sample in each]
        said = self.quarantine.note(guilty, case.view.step, stream.epoch, case.decision.reasons[0])
        stream.leave_out(self.quarantine.ids)
        return replace(resolution, reasons=[*resolution.reasons, *(f"quarantine: {reason}" for reason in said)])

    def report_changes(self) -> None:
        """Put what was changed of the computation, and how to make it permanent, into the result."""
        islands = next((guard for guard in self._step.guards if isinstance(guard, Islands)), None)
        if islands is not None and islands.grown:
            self._run.result.islands = {"modules": list(islands.grown), "yaml": islands.yaml()}
        self._run.result.patches = self._step.patches.to_plain()
        self._run.result.quarantined = self.quarantine.ids

    def state_dict(self) -> dict[str, Any]:
        good = self.repairs.last_good
        return {
            "quarantine": self.quarantine.state_dict(),
            "known": self.investigator.state_dict(),
            "losses": None if good is None else [good.first, good.lowest, list(good.losses.values)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The last good window itself is not kept: until a step is committed there is no batch to look at."""
        self.investigator.load_state_dict(state["known"])
        if "quarantine" in state:
            self.quarantine.load_state_dict(state["quarantine"])
        if state["losses"] is not None:
            self.repairs.last_good = LastGood.resumed(*state["losses"])
