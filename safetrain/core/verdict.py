"""What guards answer, and the one rule that merges their answers."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Action(enum.IntEnum):
    """The four outcomes of a step, in order of severity.

    >>> max(Action.SKIP, Action.ROLLBACK), str(Action.SKIP)
    (<Action.ROLLBACK: 2>, 'skip')
    """

    COMMIT = 0
    SKIP = 1
    ROLLBACK = 2
    STOP = 3

    def __str__(self) -> str:
        return self.name.lower()


class Doubt(enum.Enum):
    """How a doubtful refusal is confirmed.

    >>> easy = Verdict(Action.SKIP, reason="a spike in the third step", doubt=Doubt.LAST_GOOD_BATCH)
    >>> merge([("early", easy)]).undoubted.action
    <Action.COMMIT: 0>
    """

    LAST_GOOD_BATCH = "last_good"
    """The batch that was committed last is bad now too."""
    SINCE_START = "start"
    """The weights that training began with give a better loss on this very step."""
    REPLAY = "replay"
    """The step, computed once more, gives other gradients bit for bit."""
    TRIAL = "trial"
    """The update is tried, and good batches become clearly worse by it."""
    BRANCHES = "branches"
    """Short runs from here and from an earlier state are compared, and one from the earlier state is clearly better."""
    DEAD = "dead"
    """The outputs of the model depend on no weight, for none of the newest batches and not for the hardest one lately."""
    NEW_WEIGHTS = "new_weights"
    """Nothing was learned yet, and layers can be given new weights (the rung `reinitialise`)."""
    LOWER_RATE = "lower_rate"
    """A short run from the start, at `lr_share` of the learning rate, gets clearly further than the run itself has."""


@dataclass(frozen=True)
class Finding:
    """Something wrong that no single number of a step shows: training goes on, and does not learn or learns the wrong thing.

    In a verdict that lets the step pass it is a warning (`result.warnings`); of a refused step it is the cause.
    """

    label: str
    """One of `core.causes`."""
    text: str
    """A sentence for people, with the numbers."""
    names: tuple[str, ...] = ()
    """The parameters or modules that it is about."""
    ranks: tuple[int, ...] = ()
    """The processes that it is about; none if it is about all, or if it is not known which."""


@dataclass(frozen=True)
class Verdict:
    """A guard's answer about one step.

    `lr_scale` multiplies the scheduled learning rate of this step; `reason` is a sentence for people, required when the
    step is refused; `evidence` holds the numbers behind it for people: `signal` and `value` name what tripped. All that
    recovery acts on are the fields below it.

    >>> Verdict()  # let the step pass
    Verdict(action=<Action.COMMIT: 0>, lr_scale=1.0, reason='', evidence={})
    >>> refusal = Verdict(Action.SKIP, reason="loss 12 is above 10", evidence={"signal": "loss", "value": 12.0})
    """

    action: Action = Action.COMMIT
    lr_scale: float = 1.0
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    salvage: bool = field(default=False, repr=False)
    """On a refusal for a number that is not finite: the window may be tried once more without its non-finite micro-batches, if
    every guard that refuses says so."""
    bad_samples: Mapping[int, Sequence[int]] = field(default_factory=dict, repr=False)
    """Rows that are at fault, by the index of their micro-batch. Of data given as a Dataset they are counted, and left out of
    later epochs after `recovery.quarantine_after` incidents."""
    bad_state: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names of parameters, optimizer state or buffers that are not sound, with what is wrong. The step is then not repaired, and
    after a rollback the next updates are checked before they count."""
    if_state_is_bad: bool = field(default=False, repr=False)
    """On a ROLLBACK: several refusals in a row explain it as well as a bad state does, so go back only if the last good batch
    no longer gives a good loss; otherwise the step is skipped."""
    restart: bool = field(default=False, repr=False)
    """If the run has to go back: training has led nowhere yet, so start again from the first snapshot at a lower learning rate."""
    expected_loss: float | None = field(default=None, repr=False)
    """What the loss was lately. A restart at a loss more than a million times as large lowers the learning rate twice."""
    since: int | None = field(default=None, repr=False)
    """On a ROLLBACK: the trouble began with this step, so only an earlier state will do."""
    doubt: Doubt | None = field(default=None, repr=False)
    """The refusal holds only if this look at the weights confirms it, and a restart is still within its budget; otherwise the
    step is committed."""
    doubt_margin: float = field(default=0.0, repr=False)
    """Share of the loss by which the present weights must be worse than the first ones for `Doubt.SINCE_START`."""
    lr_share: float = field(default=1.0, repr=False)
    """The share of the learning rate that `Doubt.LOWER_RATE` tries, and that a restart then goes on with."""
    detect_anomaly: bool = field(default=False, repr=False)
    """Also run the replay of the step, if it is refused, in autograd's anomaly mode. Works in a verdict that lets the step pass,
    when another guard refuses it."""
    recording: Any = field(default=None, repr=False)
    """What the guard measured in this step, as plain numbers, strings, lists and dicts. If the guard has a method `records()`, which
    returns the same of earlier steps, both are written to `flight_recorder.json` of the incident."""

    sound_rank: int | None = field(default=None, repr=False)
    """On a ROLLBACK: the state of some rank is not what it should be, and that of this one is. If each has the whole model, the others
    take it over, and the step is run again."""
    findings: tuple[Finding, ...] = field(default=(), repr=False)
    """What is wrong although every number is finite, the gravest first."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr_scale) and self.lr_scale >= 0):
            raise ValueError(f"lr_scale must be finite and not negative, got {self.lr_scale}")
        if self.action > Action.COMMIT and not self.reason:
            raise ValueError(f"a verdict of {self.action} needs a reason")
        for name in ("evidence", "bad_samples", "bad_state"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name} of a verdict must be a dict, got {getattr(self, name)!r}")
        if not (self.doubt is None or isinstance(self.doubt, Doubt)):
            raise ValueError(f"doubt of a verdict must be one of {', '.join(map(str, Doubt))}, got {self.doubt!r}")
        if not all(isinstance(number, (int, float)) for number in (self.expected_loss or 0.0, self.doubt_margin)):
            raise ValueError("expected_loss and doubt_margin of a verdict must be numbers")


COMMIT = Verdict()


@dataclass(frozen=True)
class Decision:
    """All verdicts of a step merged: what will be done, and every reason with the guard that gave it.

    >>> Decision(Action.SKIP, 1.0, {"ceiling": Verdict(Action.SKIP, reason="loss 12 is above 10")}).reasons
    ['ceiling: loss 12 is above 10']
    """

    action: Action
    lr_scale: float
    verdicts: Mapping[str, Verdict]

    @functools.cached_property
    def is_silent(self) -> bool:
        """No guard has given a reason."""
        return not any(verdict.reason for verdict in self.verdicts.values())

    @property
    def reasons(self) -> list[str]:
        """Every reason given, the most severe first, ties by guard name."""
        return [f"{guard}: {v.reason}" for guard, v in self.by_severity() if v.reason]

    def by_severity(self) -> list[tuple[str, Verdict]]:
        return sorted(self.verdicts.items(), key=lambda item: (-item[1].action, item[0]))

    @property
    def salvage(self) -> bool:
        """Every guard that refuses would accept the window without its non-finite micro-batches."""
        return all(v.salvage for v in self.verdicts.values() if v.action > Action.COMMIT)

    @property
    def undoubted(self) -> Decision:
        """What the guards say if every refusal with a `doubt` passes."""
        return self.doubted_only_by()

    def doubted_only_by(self, *doubts: Doubt) -> Decision:
        """What the guards say if every refusal with another doubt passes."""
        sure = {n: v for n, v in self.verdicts.items() if v.action is Action.COMMIT or v.doubt in (None, *doubts)}
        return self if len(sure) == len(self.verdicts) else merge(sure.items())

    @property
    def tried(self) -> Decision:
        """What the guards say once trials have found every refusal with a `doubt` to be wrong: those only remark on it. A guard
        learns by `was_tried` that it was wrong."""
        remarks = {
            name: Verdict(reason=f"{v.reason}; tried, and harmless", evidence=v.evidence)
            for name, v in self.verdicts.items()
            if v.action > Action.COMMIT and v.doubt is not None
        }
        undoubted = self.undoubted
        return Decision(undoubted.action, undoubted.lr_scale, {**undoubted.verdicts, **remarks})

    def was_tried(self, guard: str) -> bool:
        """That guard's doubtful refusal was found to be wrong."""
        verdict = self.verdicts.get(guard)
        return verdict is not None and verdict.action is Action.COMMIT and "signal" in verdict.evidence

    @property
    def decisive(self) -> tuple[str, Verdict]:
        """The guard whose verdict decided, with that verdict."""
        return self.by_severity()[0]


def merge(verdicts: Iterable[tuple[str, Verdict]]) -> Decision:
    """The most severe action wins, the smallest learning-rate scale wins, every reason is kept.

    Commutative and associative, so the order of guards means nothing.

    >>> merge([("a", Verdict(Action.SKIP, reason="odd")), ("b", Verdict(lr_scale=0.5))]).lr_scale
    0.5
    """
    by_guard = dict(verdicts)
    action = max((v.action for v in by_guard.values()), default=Action.COMMIT)
    lr_scale = min((v.lr_scale for v in by_guard.values()), default=1.0)
    return Decision(action, min(lr_scale, 1.0), by_guard)
