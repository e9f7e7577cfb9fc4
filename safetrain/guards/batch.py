"""Checks the data of a step: NaN or Inf, empty batches, labels out of range, changed types."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Verdict
from ..core.view import DeviceStep, StepView
from .base import Guard

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .batch_checks import Checks

# What bad data makes torch raise: an index out of range, a distribution given NaN, an operation on the wrong type.
RAISED = (IndexError, ValueError, RuntimeError, ArithmeticError, AssertionError)


@dataclass
class BatchConfig:
    action: str = option("drop", choices=("drop", "skip", "warn"))
    """`drop`: the step is refused, and may be tried again without the bad samples. `skip`: refused. `warn`: a warning, the step passes."""
    only_if_bad: bool = True
    """Act only when the step is in trouble anyway: it raised, or its loss or gradient is not finite. `false` also refuses
    bad data that the model would have coped with."""
    ignore: list[str] = field(default_factory=list)
    """Globs over fields that are not checked, such as targets that hold NaN on purpose. A field is named by its key, a dotted
    path when nested, and in a tuple by its position (`"1"`)."""
    labels: list[str] = field(default_factory=lambda: ["label*", "target*", "y", "1"])
    """Globs over fields that hold class labels if they are integers. They are compared with the class dimension of the
    model's output that fits their shape."""
    ignore_index: int = -100
    """A label that is not a class; as in `torch.nn.functional.cross_entropy`."""


class Batch(Guard):
    Config = BatchConfig
    config: BatchConfig
    measures_backward = False
    over_ranks = "max"

    def __init__(self, config: BatchConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.dtypes: dict[str, str] = {}
        self._shapes: set[tuple[int, ...]] = set()

    def attach(self, model: nn.Module) -> Callable[[], None] | None:
        if not self.config.labels:
            return None
        from .batch_checks import output_shapes

        def note_shapes(_: nn.Module, args: Any, output: Any) -> None:
            self._shapes.update(output_shapes(output))

        return model.register_forward_hook(note_shapes).remove

    def begin(self, step: int, num_refused: int) -> None:
        self._shapes.clear()

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        return {"bad": self._checks().num_bad(step.window, like=step.loss)}

    def judge(self, view: StepView) -> Verdict:
        bad = view.signals.get(f"{self.name}.bad", 0.0) != 0.0
        if not (bad or view.error) or (self.config.only_if_bad and not view.in_trouble):
            return COMMIT
        from .batch_checks import bad_rows, evidence, sentence

        problems = self._checks().problems(window := view.window())
        if not (bad or problems):  # it raised for another reason
            return COMMIT
        action = Action.COMMIT if self.config.action == "warn" else Action.SKIP
        drop = self.config.action == "drop"
        rows = bad_rows(problems)
        return Verdict(
            action,
            reason=sentence(problems),
            evidence={**evidence(problems, rows, window), "drop": drop},
            salvage=drop and view.in_trouble and len(window) > 1,
            bad_samples=rows,
        )

    def explains(self, view: StepView) -> bool:
        refuses = self.config.action != "warn" and isinstance(view.error, RAISED)
        return refuses and bool(self._checks().problems(view.window()))

    def learn(self, view: StepView, decision: Decision) -> None:
        if (verdict := decision.verdicts.get(self.name)) and verdict.reason:
            warnings.warn(f"step {view.step}: {verdict.reason}", RuntimeWarning, stacklevel=2)
        elif not self.dtypes and (window := view.window()):
            from .batch_checks import dtypes

            self.dtypes = dtypes(window)

    def state_dict(self) -> dict[str, Any]:
        return {"dtypes": dict(self.dtypes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dtypes = dict(state["dtypes"])

    def _checks(self) -> Checks:
        from .batch_checks import Checks

        config = self.config
        return Checks(config.ignore, config.labels, config.ignore_index, self.dtypes, self._shapes)
