"""The rungs of the ladder, least invasive first. Each is tried only when the evidence supports it, and only within its budget."""

from __future__ import annotations

import re
from typing import ClassVar

from ..config.schema import RecoveryConfig
from ..core.causes import CAUSES
from ..core.verdict import Action
from .holding import can_hold
from .refused_step import RefusedStep, Resolution
from .repairs import Repairs

RUNGS: dict[str, type[Rung]] = {}


class Rung:
    """One way out. Its name is its class name in snake case; ours are known by it in `recovery.ladder`, yours by where it is.

    A rung of your own needs `fits` and `climb`, and `budget` if it should not be that of retries.
    """

    name: ClassVar[str]
    budget_name: ClassVar[str]
    """The budget that it is spent from: its own name, unless several rungs share one."""
    changes_the_computation: ClassVar[bool] = False
    """One of ours is then only used when `recovery.heal` lists it."""
    lasts: ClassVar[bool] = False
    """What it does stays for the rest of the run, and its budget is for all of it."""
    failures_count: ClassVar[bool] = True
    """Trying it costs something even if it does not help, so that counts too."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        if "budget_name" not in vars(cls):
            cls.budget_name = cls.name
        if cls.__module__ == __name__:  # a user's rung must not replace a built-in one
            RUNGS[cls.name] = cls

    def budget(self, config: RecoveryConfig) -> int:
        """How often this rung may be climbed within `recovery.budget_steps`, or in the whole run if it `lasts`."""
        return config.max_retries

    def fits(self, case: RefusedStep) -> bool:
        """Whether the evidence supports it."""
        raise NotImplementedError(f"{type(self).__name__} must define fits(case)")

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        """Try it; a string says why it did not help."""
        raise NotImplementedError(f"{type(self).__name__} must define climb(case, repairs)")


class Retry(Rung):
    """A fault that does not reproduce: run the very same step once more."""

    def fits(self, case: RefusedStep) -> bool:
        # Without a replay it is unknown whether the fault reproduces; trying finds out.
        if case.is_late or case.is_fault_of_schedule:
            return False
        return case.is_non_finite and case.incident.replay.reproduced is not True

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        if repairs.try_again(case, case.window):
            return Resolution(Action.COMMIT, ["the fault did not reproduce: the same step was run again and committed"])
        return "the same step fails again"


class Samples(Rung):
    """Leave out the samples that were shown to be guilty, and train on the rest of the batch."""

    changes_the_computation = True

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_healed

    def fits(self, case: RefusedStep) -> bool:
        return case.is_non_finite and not case.is_late and case.may_drop_samples

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        if not repairs.try_again(case, case.without_guilty_samples()):
            return "the rest of the batch fails too"
        named = ", ".join(map(str, case.incident.samples[:8])) + (" …" if len(case.incident.samples) > 8 else "")
        whose = "the batch" if case.local_blame is None else f"the batch of rank {case.incident.rank}"
        return Resolution(Action.COMMIT, [f"sample {named} of {whose} left out, the rest committed"])


class MicroBatch(Rung):
    """Leave out the non-finite micro-batch of a window and train on the others, if `guards.finite.drop_micro_batch` says so."""

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_healed

    def fits(self, case: RefusedStep) -> bool:
        return case.is_non_finite and not case.is_late and case.decision.salvage and len(case.window) > 1

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        bad = repairs.bad_micro_batches(case)
        kept = [batch for index, batch in enumerate(case.window) if index not in bad]
        if not bad or not kept or not repairs.try_again(case, kept):
            return "no finite micro-batches are left"
        named = ", ".join(map(str, bad))
        return Resolution(Action.COMMIT, [f"micro-batch {named} of {len(case.window)} left out (counted from 0)"])


class Island(Rung):
    """Keep the module that overflows in half precision in float32 from now on."""

    changes_the_computation = True
    lasts = True

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_islands

    def fits(self, case: RefusedStep) -> bool:
        return case.is_non_finite and not case.is_late and case.island is not None

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        assert case.island is not None
        if not repairs.may_grow_islands:
            return "this version of torch would compute the compiled backward pass of a float32 island in low precision"
        repairs.grow_island(case.island)
        if not repairs.try_again(case, case.window):
            repairs.shrink_island(case.island)
            return "it did not keep the step finite"
        return Resolution(Action.COMMIT, [f"{case.island or 'the model'} is kept in float32 from now on"])


class Patch(Rung):
    """Run the safe variant of the operation at the blamed line, until the source is fixed."""

    changes_the_computation = True
    lasts = True

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_patches

    def fits(self, case: RefusedStep) -> bool:
        return case.is_non_finite and not case.is_late and case.patch is not None

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        patched = repairs.patch(case)
        if patched is None:
            return "its safe variant runs at that line already"
        if not repairs.try_again(case, case.window):
            repairs.unpatch(case)
            return "with it the step is still refused"
        return Resolution(Action.COMMIT, [f"{patched}; to make it permanent: {case.incident.fix}"])


class Replicas(Rung):
    """Of ranks whose state is not what it should be: take over that of a rank where it is, and run the step once more."""

    def fits(self, case: RefusedStep) -> bool:
        return case.sound_rank is not None and not case.is_late

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        rank = case.sound_rank
        if rank is None or not repairs.take_over(rank):
            return "no rank has the whole model"
        if not repairs.try_again(case, case.window):
            return f"with the state of rank {rank} the step is refused, too"
        return Resolution(
            Action.COMMIT, [f"all ranks took over the state of rank {rank}, and the step was run again and committed"]
        )


class Hold(Rung):
    """Leave as it is what would become non-finite in step after step: the learning rate of a schedule that fails, a few parameters,
    entries of a buffer. An `eps` that is zero in half precision is raised."""

    changes_the_computation = True
    lasts = True

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_held

    def fits(self, case: RefusedStep) -> bool:
        return can_hold(case)

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        held = repairs.hold(case)
        if held is None:
            return "nothing is known that could be held"
        if not repairs.try_again(case, case.window):
            repairs.release()
            return "that did not keep the step finite"
        return Resolution(Action.COMMIT, [held])


class Skip(Rung):
    """Skip the step, as long as the last good batch shows that the state is sound."""

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_refusals + 1  # the bound on all refusals comes first, and says so

    def fits(self, case: RefusedStep) -> bool:
        if case.is_fault_of_schedule:
            return False
        return case.decision.action is Action.SKIP or case.needs_probe or case.state_problem is not None

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        if case.state_problem is not None:
            return case.state_problem
        if case.harm is not None and case.decision.action is Action.SKIP:
            return Resolution(Action.SKIP, [f"tried: {case.harm}; refused"])
        is_dynamics = case.is_non_finite and not case.is_fault_of_data
        if case.decision.action is Action.SKIP and (case.is_fault_of_data or not repairs.has_good_batch()):
            return Resolution(Action.SKIP, is_dynamics=is_dynamics)
        if (problem := repairs.state_problem()) is not None:
            return problem
        if case.decision.action is Action.SKIP:
            return Resolution(Action.SKIP, is_dynamics=is_dynamics)
        return Resolution(
            Action.SKIP, ["the last good batch is as good as it was: the data is at fault, not the state"]
        )


class Reinitialise(Rung):
    """Give layers that are dead, or whose weights are of the wrong size, new weights, when nothing was learned yet."""

    lasts = True

    def budget(self, config: RecoveryConfig) -> int:
        return min(1, config.max_restarts)

    def fits(self, case: RefusedStep) -> bool:
        if (
            case.is_late
            or case.has_bad_state
            or case.is_fault_of_data
            or case.is_rate_too_high
            or case.is_fault_of_schedule
        ):
            return False
        return case.hardly_learned

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        layers = repairs.reinitialise(case)
        if not layers:
            return "the weights that training began with are of the usual size, and not dead"
        named = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
        case.was_reinitialised = True
        return Resolution(
            Action.ROLLBACK, [f"training starts again with new weights (kaiming_normal_, biases 0) in {named}"]
        )


class Rollback(Rung):
    """Go back to the newest trusted snapshot, or an older one when that did not help, past the data that led here."""

    to: ClassVar[str] = "trusted"
    failures_count = False  # finding nothing to go back to costs nothing

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_rollbacks

    def fits(self, case: RefusedStep) -> bool:
        return not case.wants_restart and not case.is_fault_of_schedule

    def climb(self, case: RefusedStep, repairs: Repairs) -> Resolution | str:
        if case.num_equal >= 2 and CAUSES[case.incident.cause.label].is_silent:
            return (
                f"going back did not help the {case.num_equal} times before: {CAUSES[case.incident.cause.label].advice}"
            )
        where = repairs.roll_back(case, self.to)
        if where is None:
            return "there is nothing to go back to"
        return Resolution(Action.ROLLBACK, [f"went back to {where}"], is_dynamics=case.lr_share != 1.0)


class Disk(Rollback):
    """Go back to the newest checkpoint on disk that verifies."""

    to = "disk"
    budget_name = "rollback"


class Restart(Rollback):
    """Start again from the first snapshot at a lower learning rate, when nothing was learned yet."""

    to = "first"
    lasts = True

    def budget(self, config: RecoveryConfig) -> int:
        return config.max_restarts

    def fits(self, case: RefusedStep) -> bool:
        return case.wants_restart and not case.is_fault_of_schedule
