"""Detects training that runs but does not learn, or learns the wrong thing, although every number is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..core.options import option
from ..core.verdict import COMMIT, Action, Decision, Doubt, Finding, Verdict
from ..core.view import DeviceStep, FirstLoss, StepView
from .base import Guard
from .course import Course

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .data_looks import BatchLooks
    from .graph import Chains
    from .loss_graph import ConstantAnswer
    from .modes import MatmulTypes, TrainingModes
    from .weights import WeightLooks

FIRST = 4
"""The first steps, which are looked at closely."""
VANISHED = 1e-5
"""Share of the gradient of the last layers, element by element, below which the first ones get practically none."""
VANISHING = f"the first layers get less than {VANISHED:g} of the gradient of the last ones"
OFTEN = 4
"""A sample of the weights is looked at every N steps."""
PATIENCE = 20
"""Steps in which a parameter that other entries of its list took turns with was not reached, or one that was reached is not any more."""
BEGINNING = 60
"""Steps after which a loss that is no better than a constant answer, with vanishing gradients, is a reason for other first weights."""


@dataclass
class SanityConfig:
    look_every: int = option(100, ge=2)
    """Look at all bits of the weights every N steps, to find what does not move, what moved by itself, and ranks that differ. A few
    elements are looked at every 4 steps, and in every step of several processes."""
    no_progress_steps: int | None = option(1000, ge=20)
    """After this many steps (or half of the run) a loss that is no better than that of the same answer for every sample is reported.
    null: never."""
    stop_after: int = option(20, ge=2)
    """Applied steps in a row that changed no weight, after which the run stops: nothing can be learned."""
    strict: bool = False
    """Stop at the first finding."""
    ignore: list[str] = field(default_factory=list)
    """Labels of findings that are not to be reported (`not_in_optimizer`, say), and globs over parameters that are not looked at."""


class Sanity(Guard):
    Config = SanityConfig
    config: SanityConfig
    measures_backward = False
    over_ranks = "max"

    def __init__(self, config: SanityConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.course = Course()
        self.said: set[str] = set()
        """Labels that were reported; each is said once."""
        self.num_same = self.num_unchanged = self.num_repeated = self.num_alike = self.num_shared = 0
        self.num_vanished = self.num_dead = 0
        self._last: tuple[float, float, float, int] | None = None
        """Sampled weights, batch, learning rate and epoch of the last committed step."""
        self._model: nn.Module | None = None
        self._found: list[Finding] = []
        self._waiting: dict[str, Any] = {}
        self._missing: dict[str, Any] = {}
        self._reached: dict[str, Any] = {}
        """Parameters that the first loss depends on."""
        self._always: Chains = frozenset()
        self._num_lost = 0
        """Steps in a row in which some of them were not reached."""
        self._asked = False
        """For new weights: that is done once."""
        self._first_step: int | None = None
        self._looks: WeightLooks | None = None
        self._modes: TrainingModes | None = None
        self._types: MatmulTypes | None = None
        self._batches: BatchLooks | None = None
        self._constant: ConstantAnswer | None = None
        self._precision = "fp32"
        self._sound_rank: int | None = None
        """When the ranks differ: one whose weights are right, if that is known."""

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> Callable[[], None]:
        self._model = model
        return self._detach

    def _detach(self) -> None:
        self._model = self._looks = self._modes = None
        if self._types is not None:
            self._types.remove()
            self._types = None

    def begin(self, step: int, num_refused: int) -> None:
        if num_refused:
            self._start_counting_again()
        if self._model is not None and self._modes is None:
            from ..precision.compiled import called_for
            from .modes import MatmulTypes, TrainingModes

            self._modes = TrainingModes(self._model)
            if called_for(self._model) is self._model:  # hooks that come and go would compile it again
                self._types = MatmulTypes(self._model)

    def inspect(self, first: FirstLoss) -> None:
        from ..tensors.sharded import is_sharded
        from .data_looks import BatchLooks
        from .graph import chains, coverage, graph_of
        from .loss_graph import ConstantAnswer, broadcast, mismatches
        from .weights import WeightLooks

        is_whole, self._always = not is_sharded(first.model), chains(first.model)
        graph = graph_of(first.loss)
        self._found += [*mismatches(graph), *filter(None, [broadcast(first.loss)])]
        if is_whole:
            covered = coverage(first, graph)
            self._found += covered.findings
            self._missing, self._waiting, self._reached = covered.missing, covered.waiting, covered.reached
        self._constant, self._precision = ConstantAnswer(first.loss, first.window), first.precision
        held = {id(p) for group in first.optimizer.param_groups for p in group["params"] if group.get("lr", 1.0) != 0}
        weights = {name: p for name, p in first.model.named_parameters() if id(p) in held and p.requires_grad}
        weights = {name: p for name, p in weights.items() if not self._ignores(name)}
        self._looks, self._batches = WeightLooks(weights, is_whole, self._always) if weights else None, BatchLooks()

    # ---- a step --------------------------------------------------------------------------------------------------

    def measure(self, step: DeviceStep) -> Mapping[str, Tensor]:
        if self._batches is None:  # the first loss was not seen
            return {}
        if self._first_step is None:
            self._first_step = step.step
        age, every = step.step - self._first_step, self.config.look_every
        if self._modes is not None and (mode := self._modes.finding()) is not None:
            self._found.append(mode)
        signals: dict[str, Tensor] = {}
        if not self._is_due(step.step, age):
            return signals
        if self._looks is not None:
            is_look = age < FIRST or step.step % every == 0 or self.num_same >= 2 or self.num_dead > 0
            signals |= self._looks.measure(step.step, is_look, step.grad_norm)
        if age < PATIENCE or step.step % every in (0, 1, 2):
            signals |= self._batches.measure(step.window, step.loss)
        if age < PATIENCE and self._constant is not None and (constant := self._constant.loss(step.window)) is not None:
            signals["constant_loss"] = constant.to(step.loss.device, step.loss.dtype)
        self._look_at_modules(age)
        self._look_at_gradients(step.step)
        return signals

    def _is_due(self, step: int, age: int) -> bool:
        """Whether there is anything to measure in this step. Of ranks, every step is compared."""
        if age <= PATIENCE or step % OFTEN == 0 or step % self.config.look_every < 3 or self._types is not None:
            return True
        if self.num_same or self.num_dead > 0 or self._num_lost:
            return True
        return self._looks is not None and (self._looks.compares_ranks or self._looks.is_between(step))

    def _look_at_gradients(self, step: int) -> None:
        """Parameters that are not reached any more: frozen, or used under no_grad, in the middle of the run."""
        if not self._reached or not (self._num_lost or step % (3 * OFTEN) == 0):
            return
        lost = [name for name, p in self._reached.items() if p.grad is None]
        self._num_lost = self._num_lost + 1 if lost and len(lost) < len(self._reached) else 0
        if self._num_lost < PATIENCE:
            return
        from .graph import no_longer_reached

        self._num_lost = 0
        if (finding := no_longer_reached(lost, self._reached, step - PATIENCE, self._always)) is not None:
            self._found.append(finding)
        self._reached = {}

    def _look_at_modules(self, age: int) -> None:
        if self._types is not None:
            if (finding := self._types.finding(self._precision)) is not None:
                self._found.append(finding)
            self._types.remove()
            self._types = None
        if self._missing and age > 0:  # a loss may be of one part in this step and of another in the next
            from .graph import not_reached

            if missing := [name for name, p in self._missing.items() if p.grad is None]:
                self._found.append(not_reached(missing))
            self._missing = {}
        if self._waiting:
            from .graph import not_reached, without_siblings

            came = [name for name, p in self._waiting.items() if p.grad is not None]
            if came:  # each step chooses between them
                self._waiting = without_siblings(self._waiting, came, self._always)
            if self._waiting and age >= PATIENCE:
                self._found.append(not_reached(self._waiting))
                self._waiting = {}

    def judge(self, view: StepView) -> Verdict:
        if view.in_trouble or view.scaler_overflow:
            return COMMIT
        own = self._own(view)
        if not own and not self._found and self.course.is_quiet:
            return COMMIT
        if self.num_unchanged >= self.config.stop_after:
            finding = Finding("weights_unchanged", f"{self.num_unchanged} applied steps in a row changed no weight")
            return self._verdict(Action.STOP, [finding])
        if self.course.is_hopeless(view.total_steps, self.config.stop_after) and not self._is_ignored("rate_too_low"):
            return self._verdict(Action.STOP, list(filter(None, [self.course.too_slow(view.total_steps)])))
        if (
            self.num_dead >= self.config.stop_after
            and not self.course.has_learned
            and not self._is_ignored("dead_network")
        ):
            text = f"the gradient of every weight matrix has been exactly 0 for {self.num_dead} steps, at a loss of {view.loss:.4g}"
            return replace(self._verdict(Action.ROLLBACK, [Finding("dead_network", text)]), doubt=Doubt.DEAD)
        if (reason := self._needs_new_weights(view, own)) is not None:
            return replace(self._verdict(Action.ROLLBACK, [reason]), doubt=Doubt.NEW_WEIGHTS, restart=True)
        findings = [*self._found, *self._about_weights(view, own), *self._about_data(), *self._about_course(view)]
        findings = [f for f in findings if f.label not in self.said and not self._is_ignored(f.label)]
        if not findings:
            return COMMIT
        if any(finding.label == "replicas_differ" for finding in findings):
            return replace(self._verdict(Action.ROLLBACK, findings), sound_rank=self._sound_rank)
        return self._verdict(Action.STOP if self.config.strict else Action.COMMIT, findings)

    def _verdict(self, action: Action, findings: list[Finding]) -> Verdict:
        reason = "; ".join(finding.text for finding in findings)
        evidence = {"signal": findings[0].label, "value": None, "names": findings[0].names}
        return Verdict(action, reason=reason, evidence=evidence, findings=tuple(findings))

    def _own(self, view: StepView) -> dict[str, float]:
        """What `measure` found in this step; nothing in most."""
        prefix = f"{self.name}."
        return {name[len(prefix) :]: value for name, value in view.signals.items() if name.startswith(prefix)}

    def _needs_new_weights(self, view: StepView, own: Mapping[str, float]) -> Finding | None:
        """A network that is dead from the start, or so deep that nothing arrives at its first layers and that has learned nothing."""
        if self._asked or self._looks is None or view.loss == 0.0:
            return None
        if own.get("zeros") and not self._is_ignored("dead_network") and view.grad_norm > 0:
            names = self._looks.without_gradient()
            if 2 * len(names) >= self._looks.num_matrices and self.course.num_seen < PATIENCE:
                text = f"{_listed(names)} get a gradient of exactly 0: the network is dead from the start"
                return Finding("dead_network", text, names)
        if self.course.too_slow(view.total_steps) is not None and self.course.starts_far_above_constant:
            text = (
                f"the loss starts at {self.course.start:.3g}, the same answer for every sample would give {self.course.constant.mean:.3g}, and "
                "an update changes next to nothing: the weights that training began with are far too large"
            )
            return Finding("divergence", text)
        has_vanished = self.num_vanished >= 2 and not self._is_ignored("vanishing_gradients")
        if has_vanished and self.course.num_seen >= BEGINNING and self.course.is_above_constant(BEGINNING):
            text = f"{VANISHING}, and after {self.course.num_seen} steps the loss is no better than that of a constant answer"
            return Finding("vanishing_gradients", text)
        return None

    def _about_weights(self, view: StepView, own: Mapping[str, float]) -> list[Finding]:
        looks = self._looks
        found: list[Finding] = []
        if looks is None:
            return found
        for name in ("all_weights", "weights"):
            most, least = own.get(name), own.get(f"{name}_negative")
            if most is not None and least is not None and most != -least:
                differing = looks.differing()
                names, ranks = differing.names, differing.ranks
                who = f"rank {', '.join(map(str, ranks))} differs" if ranks else "the ranks differ"
                text = f"{who} in {len(names)} of {len(looks.names)} weights: {_listed(names)}"
                found.append(Finding("replicas_differ", text, names, ranks))
                self._sound_rank = differing.sound_rank
                break
        can_move = self._last is not None and self._last[2] > 0 and view.lr <= self._last[2]  # else it is warming up
        if own.get("corrupt"):
            names, ranks = looks.corrupt()
            where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
            text = f"{_listed(names)} changed between two steps{where}, and no operation of torch wrote to it"
            found.append(Finding("memory_corruption", text, names, ranks))
        if can_move and own.get("unchanged") == 1.0 and looks.are_where_they_were():
            text = f"step {view.step - 1} was applied at a learning rate of {view.lr:.3g} and changed no weight"
            found.append(Finding("weights_unchanged", text, tuple(looks.names)))
        elif can_move and own.get("stuck"):
            names = looks.stuck()
            text = f"{_listed(names)} get a gradient, and do not move by it"
            found.append(Finding("weights_unchanged", text, names))
        if own.get("zeros") and view.loss != 0.0 and (names := looks.without_gradient()):
            text = f"{_listed(names)} get a gradient of exactly 0, step after step: what they compute does not change the loss"
            found.append(Finding("dead_network", text, names))
        return found

    def _about_data(self) -> list[Finding]:
        found = []
        if self.num_repeated >= 3:
            found.append(
                Finding("repeated_data", f"the same batch came {self.num_repeated + 1} times in a row in one epoch")
            )
        if self.num_alike >= 3:
            found.append(
                Finding("repeated_data", f"every sample of a batch is the same one, {self.num_alike} times in a row")
            )
        if self.num_shared >= 2:
            found.append(
                Finding("repeated_data", f"all ranks were given the same batch, {self.num_shared} times in a row")
            )
        if self.num_vanished >= 2:
            found.append(Finding("vanishing_gradients", VANISHING))
        return found

    def _about_course(self, view: StepView) -> list[Finding]:
        course = self.course
        findings = (
            course.ended_schedule(view.total_steps, max(view.lrs, default=0.0)),
            course.no_progress(
                self.config.no_progress_steps, view.total_steps, self._constant is None or self._constant.is_whole
            ),
            course.too_slow(view.total_steps),
            course.oscillation(),
        )
        return [finding for finding in findings if finding is not None]

    # ---- what was committed --------------------------------------------------------------------------------------

    def learn(self, view: StepView, decision: Decision) -> None:
        if (verdict := decision.verdicts.get(self.name)) is not None:
            self.said.update(finding.label for finding in verdict.findings)
            if decision.was_tried(self.name) and not verdict.findings:
                self._asked, self.num_dead = True, -5 * self.config.stop_after
        self._found.clear()
        if self._looks is not None:
            self._looks.applied(view.step)
        own, last, lr = self._own(view), self._last, max(view.lrs, default=0.0)
        if not math.isnan(constant := own.get("constant_loss", math.nan)):
            self.course.constant.add(constant)
        self.course.learn(view.loss, lr, view.update_size, view.total_steps)
        if own:
            self._count(own, view)
        # At the end of a schedule it is meant that nothing moves any more.
        moves = view.grad_norm > 0 and lr > 1e-4 * self.course.highest_lr
        weights = own.get("weights", -1.0 if last is None else last[0])
        self._last = (weights, own.get("batch", -1.0), lr if moves else 0.0, view.epoch)

    def _count(self, own: Mapping[str, float], view: StepView) -> None:
        """How many times in a row something was found."""
        last, batch = self._last, own.get("batch")
        if last is not None and "weights" in own:
            self.num_same = self.num_same + 1 if own["weights"] == last[0] and last[2] > 0 else 0
        if last is not None and "unchanged" in own:
            self.num_unchanged = self.num_unchanged + 1 if own["unchanged"] == 1.0 and last[2] > 0 else 0
        if "moving" in own:
            is_dead = (
                own["moving"] == 0.0 and view.loss != 0.0 and self._looks is not None and self._looks.num_matrices > 1
            )
            self.num_dead = self.num_dead + 1 if is_dead else 0
        if batch is not None:
            is_again = last is not None and batch == last[1] and view.epoch == last[3] and not own.get("same_object")
            self.num_repeated = self.num_repeated + 1 if is_again else 0
            self.num_alike = self.num_alike + 1 if own.get("alike") else 0
            self.num_shared = self.num_shared + 1 if batch == -own.get("batch_negative", math.nan) else 0
        if last is not None and "arriving" in own:  # in the first step some are 0 by design
            self.num_vanished = self.num_vanished + 1 if own["arriving"] < VANISHED else 0

    def state_dict(self) -> dict[str, Any]:
        return {"course": self.course.state_dict(), "said": sorted(self.said)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.course.load_state_dict(state["course"])
        self.said = set(state["said"])
        self._start_counting_again()

    def _start_counting_again(self) -> None:
        """After a rollback, or trial steps, what was counted belongs to other weights."""
        self.num_same = self.num_unchanged = self.num_repeated = self.num_alike = self.num_shared = 0
        self.num_vanished = self.num_dead = self._num_lost = 0
        self._last = None

    def _is_ignored(self, label: str) -> bool:
        return label in self.config.ignore

    def _ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.config.ignore)


def _listed(names: tuple[str, ...]) -> str:
    from .graph import listed

    return listed(names)
