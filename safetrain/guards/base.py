"""The guard protocol and the registry of guards by name.

    begin ─ data ─ forward/backward ─ measure ─ judge ─┬─ commit ─ learn
      │       │                         │         │    └─ refuse
    begin   attach (once)   limits ─────┘         │
                            measure ──────────────┘

A guard answers, it never acts: it sees frozen numbers and returns a verdict. It never holds the trainer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.effects import effects
from ..core.fields import Rejected, fields_of
from ..core.options import config_attribute, config_key
from ..core.protocols import check_protocol
from ..core.spelling import suggest
from ..core.verdict import Decision, Verdict
from ..core.view import DeviceStep, FirstLoss, Limits, StepView
from ..errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

REGISTRY: dict[str, type[Guard]] = {}


@dataclasses.dataclass
class NoOptions:
    """Config of a guard that has no options."""


PROTOCOL = {
    "attach": "attach(self, model) -> what removes it, or None",
    "inspect": "inspect(self, first)",
    "begin": "begin(self, step, num_refused)",
    "limits": "limits(self) -> Limits",
    "measure": "measure(self, step) -> {name: 0-d tensor}",
    "judge": "judge(self, view) -> Verdict",
    "explains": "explains(self, view) -> bool",
    "learn": "learn(self, view, decision)",
    "records": "records(self) -> list",
    "state_dict": "state_dict(self) -> dict",
    "load_state_dict": "load_state_dict(self, state)",
}


class Guard:
    """Base of all guards. Only `judge` must be written.

    A subclass is registered under its class name in snake case (`LossCeiling` becomes `loss_ceiling`), which is also its
    key in YAML. `Config` is a dataclass whose fields are the guard's options.

    >>> class Negative(Guard):
    ...     def judge(self, view):
    ...         return Verdict(Action.SKIP, reason=f"loss {view.loss:.3g}") if view.loss < 0 else Verdict()
    >>> Negative.name, Negative().judge(StepView(step=0, loss=-1.0, grad_norm=1.0)).reason
    ('negative', 'loss -1')
    """

    Config: ClassVar[type] = NoOptions
    name: ClassVar[str] = "guard"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_protocol(cls, Guard, PROTOCOL)
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        if not dataclasses.is_dataclass(cls.Config):
            raise TypeError(f"{cls.__name__}.Config must be a dataclass. To fix: put @dataclass above it.")
        known = REGISTRY.get(cls.name)
        # A user's guard with the name of a built-in one is reached by `_target_`, and does not replace that one.
        if known is None or not known.__module__.startswith(f"{__package__}."):
            REGISTRY[cls.name] = cls

    def __init__(self, config: Any = None, **options: Any) -> None:
        """Give the options as keywords, or a ready `Config`."""
        self.config = self._made_config(options) if config is None else config
        self._check_options()

    def _made_config(self, options: Mapping[str, Any]) -> Any:
        known = [field.name for field in dataclasses.fields(self.Config) if field.init]
        for name in options:
            if name not in known:
                raise UsageError(
                    f"guard {self.name} has no option {name!r}{suggest(name, known)}\nTo fix: correct its name, or leave it out."
                )
        found = effects(fields_of(self.Config), {config_key(name): value for name, value in options.items()})
        for name, problem in found.problems.items():
            raise UsageError(f"guard {self.name}: {name} {problem}.\nTo fix: correct it.")
        try:
            return self.Config(**options, **found.implied)
        except TypeError as error:
            raise UsageError(f"guard {self.name}: {error}.\nTo fix: give it the options it needs.") from error

    def _check_options(self) -> None:
        """As a config's are: types, bounds and choices."""
        if not isinstance(self.config, self.Config):
            raise UsageError(
                f"guard {self.name} was given a {type(self.config).__name__} as its config.\n"
                f"To fix: give the options as keywords, or a {self.Config.__name__}."
            )
        try:
            fields = fields_of(self.Config)
        except NameError:  # an annotation that cannot be resolved, of a name that is not global
            return
        for name, field in fields.items():
            value = getattr(self.config, config_attribute(name))
            try:
                if value != field.default:
                    field.read(value)
            except Rejected as rejected:
                raise UsageError(f"guard {self.name}: {name}: {rejected}.\nTo fix: correct it.") from None

    measures_backward: ClassVar[bool] = True
    """Whether `measure` needs the gradients, or what hooks saw of them. With several processes, signals that do not need them are
    measured before backward and travel with the loss; the others cost an exchange of their own."""
    over_ranks: ClassVar[str] = "mean"
    """How its signals are reduced over several processes: `mean` or `max`."""

    def attach(self, model: nn.Module) -> Callable[[], None] | None:
        """Install hooks on the model before the first step; return a function that removes them."""
        return None

    def inspect(self, first: FirstLoss) -> None:
        """Called once in each process, with the first loss before its backward pass. Read nothing to the host here."""

    def begin(self, step: int, num_refused: int) -> None:
        """Called before each step; `num_refused` steps directly before it were refused."""

    def limits(self) -> Limits:
        """Bounds on the gradient of the next step. The tightest of all guards' bounds is applied."""
        return Limits()

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        """0-d tensors to bring to the host with this step; they appear in `view.signals` as `<guard>.<name>`."""
        return {}

    def judge(self, view: StepView) -> Verdict:
        """The answer. Pure: called again with the same view it gives the same verdict and changes nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define judge(view) -> Verdict")

    def explains(self, view: StepView) -> bool:
        """Forward or backward raised `view.error`: True makes that a refused step instead of the end of the run."""
        return False

    def verdict(self, view: StepView) -> Verdict:
        """What `judge` answers, checked to be a verdict."""
        return self.checked(self.judge(view))

    def checked(self, answer: Any) -> Verdict:
        """What `judge` answered, if it is a verdict."""
        if not isinstance(answer, Verdict):
            raise UsageError(
                f"guard {self.name}: judge() returned {answer!r}, not a Verdict.\nTo fix: return Verdict() to let the step pass."
            )
        return answer

    def learn(self, view: StepView, decision: Decision) -> None:
        """Update baselines. Called for committed steps only, so refused values can never spoil them."""

    def records(self) -> list[dict[str, Any]]:
        """What it has recorded of the committed steps before; goes into an incident's bundle with its verdict's `recording`."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What `learn` has learned, as plain numbers, strings, lists and dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
