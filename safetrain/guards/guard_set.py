"""The guards of a run, called for the methods that they define.

What a guard leaves to its base class is not called: it would do nothing, measure nothing and bound nothing. A healthy step
costs one call of `judge` for each guard, and one of each other method that it defines.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.verdict import COMMIT, Action, Decision, merge
from ..core.view import DeviceStep, Limits, StepView, tightest
from . import Guard


class GuardSet:
    def __init__(self, guards: Sequence[Guard]) -> None:
        self._members = list(guards)
        self._begin = _answering(guards, "begin")
        self._measure = _answering(guards, "measure")
        self._limits = _answering(guards, "limits")
        self._learn = _answering(guards, "learn")
        self._commits = [COMMIT] * len(self._members)
        self._unanimous = Decision(Action.COMMIT, 1.0, {guard.name: COMMIT for guard in guards})

    def is_of(self, guards: Sequence[Guard]) -> bool:
        """Whether these are its members: recovery may have added one to the list."""
        return self._members == guards

    def begin(self, step: int, num_refused: int) -> None:
        for guard in self._begin:
            guard.begin(step, num_refused)

    def measure(self, step: DeviceStep) -> dict[str, Tensor]:
        signals: dict[str, Tensor] = {}
        for guard in self._measure:
            if measured := guard.measure(step):
                signals |= {f"{guard.name}.{name}": value for name, value in measured.items()}
        return signals

    def limits(self) -> Limits:
        if len(self._limits) == 1:
            return self._limits[0].limits()
        return tightest([guard.limits() for guard in self._limits])

    def judge(self, view: StepView) -> Decision:
        """Every guard's verdict, merged."""
        answers = [guard.judge(view) for guard in self._members]
        if answers == self._commits:
            return self._unanimous
        return merge((guard.name, guard.checked(answer)) for guard, answer in zip(self._members, answers, strict=True))

    def learn(self, view: StepView, decision: Decision) -> None:
        for guard in self._learn:
            guard.learn(view, decision)


Panel = GuardSet


def _answering(guards: Sequence[Guard], method: str) -> list[Guard]:
    """Those that have a method of their own."""
    return [g for g in guards if method in vars(g) or getattr(type(g), method) is not getattr(Guard, method)]
