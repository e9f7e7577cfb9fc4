"""The guards of a run, called for the methods that they define.

What a guard leaves to its base class is not called: it would do nothing, measure nothing and bound nothing. A healthy step
costs one call of `judge` for each guard, and one of each other method that it defines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload

from torch import Tensor, nn

from ..core.containment import is_contained
from ..core.verdict import COMMIT, Action, Decision, Verdict, merge
from ..core.view import DeviceStep, FirstLoss, Limits, StepView, tightest
from .base import REGISTRY, Guard


class GuardSet(MutableSequence[Guard]):
    """A list of guards that may be changed while it is in use."""

    def __init__(self, guards: Iterable[Guard]) -> None:
        self._model: nn.Module | None = None
        self._hooks = ExitStack()
        self._members: list[Guard] = []
        self._broken: list[Guard] = []
        """Those of ours that have raised."""
        self._set_members(list(guards))

    def _set_members(self, members: list[Guard]) -> None:
        self._members = members
        self._begin = _answering(members, "begin")
        self._measure = _answering(members, "measure")
        self._limits = _answering(members, "limits")
        self._learn = _answering(members, "learn")
        self._commits = [COMMIT] * len(members)
        self._unanimous = Decision(Action.COMMIT, 1.0, {guard.name: COMMIT for guard in members})

    @overload
    def __getitem__(self, index: int) -> Guard: ...

    @overload
    def __getitem__(self, index: slice) -> list[Guard]: ...

    def __getitem__(self, index: int | slice) -> Guard | list[Guard]:
        return self._members[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        members = list(self._members)
        members[index] = value
        self._replace(members)

    def __delitem__(self, index: int | slice) -> None:
        members = list(self._members)
        del members[index]
        self._replace(members)

    def insert(self, index: int, value: Guard) -> None:
        members = list(self._members)
        members.insert(index, value)
        self._replace(members)

    def __len__(self) -> int:
        return len(self._members)

    def _replace(self, members: list[Guard]) -> None:
        """New ones are attached to the model if the others are. The hooks of one that was removed stay until the run ends."""
        new = [guard for guard in members if not any(guard is known for known in self._members)]
        self._set_members(members)
        if self._model is not None:
            for guard in new:
                self._attach(guard, self._model)

    def named(self, name: str) -> Guard:
        """The guard of that name; one that is not there yet is made with its defaults and added."""
        found = next((guard for guard in self._members if guard.name == name), None)
        if found is None:
            found = REGISTRY[name]()
            self.append(found)
        return found

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Inside, the guards' hooks are installed on the model."""
        with ExitStack() as self._hooks:
            self._model = model
            try:
                for guard in self._members:
                    self._attach(guard, model)
                yield
            finally:
                self._model = None

    def _attach(self, guard: Guard, model: nn.Module) -> None:
        try:
            remove = guard.attach(model)
        except Exception as error:
            self._go_on_without(guard, error, "attach")
            return
        if remove is not None:
            self._hooks.callback(remove)

    def inspect(self, first: FirstLoss) -> None:
        for guard in self._members:
            try:
                guard.inspect(first)
            except Exception as error:
                self._go_on_without(guard, error, "inspect")

    def begin(self, step: int, num_refused: int) -> None:
        for guard in list(self._begin):
            try:
                guard.begin(step, num_refused)
            except Exception as error:
                self._go_on_without(guard, error, "begin")

    def measure(self, step: DeviceStep) -> dict[str, Tensor]:
        signals: dict[str, Tensor] = {}
        for guard in list(self._measure):
            try:
                measured = guard.measure(step)
            except Exception as error:
                self._go_on_without(guard, error, "measure")
                continue
            if measured:
                signals |= {f"{guard.name}.{name}": value for name, value in measured.items()}
        return signals

    def limits(self) -> Limits:
        try:
            if len(self._limits) == 1:
                return self._limits[0].limits()
            return tightest([guard.limits() for guard in self._limits])
        except Exception:
            return tightest([found for guard in list(self._limits) for found in self._limits_of(guard)])

    def _limits_of(self, guard: Guard) -> list[Limits]:
        try:
            return [guard.limits()]
        except Exception as error:
            self._go_on_without(guard, error, "limits")
            return []

    def judge(self, view: StepView) -> Decision:
        """Every guard's verdict, merged."""
        try:
            answers = [] if self._broken else [guard.judge(view) for guard in self._members]
        except Exception:
            answers = []
        if not answers:
            answers = [self._answer_of(guard, view) for guard in self._members]
        if answers == self._commits:
            return self._unanimous
        return merge((guard.name, guard.checked(answer)) for guard, answer in zip(self._members, answers, strict=True))

    def _answer_of(self, guard: Guard, view: StepView) -> Verdict:
        """What a guard answers; if it is broken, nothing, but that a step with a number that is not finite is never applied."""
        if guard not in self._broken:
            try:
                return guard.checked(guard.judge(view))
            except Exception as error:
                self._go_on_without(guard, error, "judge")
        if math.isfinite(view.loss) and math.isfinite(view.grad_norm):
            return COMMIT
        evidence = {"signal": "loss", "value": view.loss}
        return Verdict(Action.SKIP, reason=f"not finite, and the guard {guard.name} failed", evidence=evidence)

    def _go_on_without(self, guard: Guard, error: Exception, method: str) -> None:
        """Raise what a guard has raised, or report it and do not ask this guard to measure, learn or begin any more."""
        if not is_contained(error, guard, f"the guard {guard.name}, in {method}", "the run goes on without it"):
            raise error
        if guard not in self._broken:
            self._broken.append(guard)
        for asked in (self._begin, self._measure, self._limits, self._learn):
            if guard in asked:
                asked.remove(guard)

    def explain(self, view: StepView) -> bool:
        """Whether a guard knows why forward or backward raised."""
        for guard in self._members:
            try:
                if guard.explains(view):
                    return True
            except Exception as error:
                self._go_on_without(guard, error, "explains")
        return False

    def state_dict(self) -> dict[str, Any]:
        """What each of them has learned, by name; of a broken one nothing."""
        states = {}
        for guard in [each for each in self._members if each not in self._broken]:
            try:
                states[guard.name] = guard.state_dict()
            except Exception as error:
                self._go_on_without(guard, error, "state_dict")
        return states

    def learn(self, view: StepView, decision: Decision) -> None:
        for guard in list(self._learn):
            try:
                guard.learn(view, decision)
            except Exception as error:
                self._go_on_without(guard, error, "learn")


def _answering(guards: Sequence[Guard], method: str) -> list[Guard]:
    """Those that have a method of their own."""
    return [g for g in guards if method in vars(g) or getattr(type(g), method) is not getattr(Guard, method)]
